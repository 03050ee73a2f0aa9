{{- with .Values.VALUE.labels }}
    {{- toYaml . | nindent 4 }}
{{- end }}
