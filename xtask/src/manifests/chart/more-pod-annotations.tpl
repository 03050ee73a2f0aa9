{{- with .Values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
{{- end }}
