{{- if and (has .Values.platform (list "kubeadm" "typhoon")) (ne .Release.Namespace "kube-system") }}
{{- fail (printf "platform %s takes the API server's address from a ConfigMap of kube-system, which pods of namespace %s cannot mount: install this chart with --namespace kube-system" .Values.platform .Release.Namespace) }}
{{- end }}
{{- if and .Values.webhook.enabled (eq .Release.Namespace "kilo") }}
{{- fail "the webhook makes the namespace kilo for itself, in which pods of the host's network may not run: install this chart in another namespace" }}
{{- end }}
{{- if and (gt (int .Values.failover.leaders) 1) (not .Values.failover.enabled) }}
{{- fail "failover.leaders needs failover.enabled=true: without failover an agent with several leaders does not start" }}
{{- end }}
{{- if and (ne (int .Values.failover.standBys) 2) (not .Values.failover.enabled) }}
{{- fail "failover.standBys does nothing without failover.enabled=true" }}
{{- end }}
{{- if and .Values.failover.enabled (ne .Values.granularity "location") }}
{{- fail (printf "failover.enabled=true does nothing with granularity=%s: only locations have leaders to take over from" .Values.granularity) }}
{{- end }}
{{- range .Values.extraArgs }}
{{- if regexMatch "^--(listen|interface|hostname|kubeconfig|cni-source)(=|$)" . }}
{{- fail (printf "extraArgs cannot have %s: ports, probes, mounts or other containers of the chart would not follow" .) }}
{{- end }}
{{- end }}
