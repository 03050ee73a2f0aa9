{{- if .Values.forwardRules.enabled }}
        - name: xtables-lock
          hostPath:
            path: /run/xtables.lock
            type: FileOrCreate
{{- end }}
