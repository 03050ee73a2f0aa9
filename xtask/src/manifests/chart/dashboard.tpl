{{- if .Values.dashboard.enabled }}
# Grafana's sidecar finds it by its label.
apiVersion: v1
kind: ConfigMap
metadata:
  name: kilo-grafana-dashboard
  namespace: {{ .Release.Namespace }}
  labels:
    grafana_dashboard: "1"
data:
  kilo.json: |
    {{- .Files.Get "grafana-dashboard.json" | nindent 4 }}
{{- end }}
