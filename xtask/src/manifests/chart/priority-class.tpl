{{- with .Values.priorityClassName }}
      priorityClassName: {{ . }}
{{- end }}
