{{- if and (has .Values.platform (list "kubeadm" "typhoon")) (ne .Release.Namespace "kube-system") }}
{{- fail (printf "platform %s takes the API server's address from a ConfigMap of kube-system, which pods of namespace %s cannot mount: install this chart with --namespace kube-system" .Values.platform .Release.Namespace) }}
{{- end }}
{{- if and .Values.webhook.enabled (eq .Release.Namespace "kilo") }}
{{- fail "the webhook makes the namespace kilo for itself, in which pods of the host's network may not run: install this chart in another namespace" }}
{{- end }}
