{{- if ne .Values.granularity "location" }}
            - --mesh-granularity={{ .Values.granularity }}
{{- end }}
{{- if ne (int .Values.port) 51820 }}
            - --port={{ int .Values.port }}
{{- end }}
{{- if ne .Values.subnet "10.4.0.0/16" }}
            - --subnet={{ .Values.subnet }}
{{- end }}
{{- if ne .Values.topologyLabel "topology.kubernetes.io/region" }}
            - --topology-label={{ .Values.topologyLabel }}
{{- end }}
{{- if ne .Values.endpointFrom "auto" }}
            - --endpoint-from={{ .Values.endpointFrom }}
{{- end }}
{{- if .Values.failover.enabled }}
            - --failover=auto
{{- if ne (int .Values.failover.standBys) 2 }}
            - --stand-bys={{ int .Values.failover.standBys }}
{{- end }}
{{- if ne (int .Values.failover.leaders) 1 }}
            - --leaders={{ int .Values.failover.leaders }}
{{- end }}
{{- end }}
{{- if .Values.pageToken.enabled }}
            - --page-access=token
{{- end }}
{{- if .Values.slices.enabled }}
            - --slices=auto
{{- end }}
{{- if .Values.forwardRules.enabled }}
            - --iptables-forward-rules
{{- end }}
{{- range .Values.extraArgs }}
            - {{ . | quote }}
{{- end }}
