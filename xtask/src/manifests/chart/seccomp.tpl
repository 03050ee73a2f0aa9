            seccompProfile:
              type: {{ .Values.seccompProfile }}
