{{- with .Values.resources }}
            {{- toYaml . | nindent 12 }}
{{- else }}
{# source #}
{{- end }}
