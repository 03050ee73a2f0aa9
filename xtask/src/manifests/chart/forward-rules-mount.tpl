{{- if .Values.forwardRules.enabled }}
            - name: xtables-lock
              mountPath: /run/xtables.lock
{{- end }}
