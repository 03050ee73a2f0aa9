{{- with .Values.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
{{- end }}
