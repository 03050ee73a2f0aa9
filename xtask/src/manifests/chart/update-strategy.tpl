{{- with .Values.updateStrategy }}
    {{- toYaml . | nindent 4 }}
{{- else }}
{# source #}
{{- end }}
