{{- if .Values.forwardRules.enabled }}
                - NET_RAW # iptables of the legacy tables opens a raw socket
{{- end }}
