{{- with .Values.podLabels }}
        {{- toYaml . | nindent 8 }}
{{- end }}
