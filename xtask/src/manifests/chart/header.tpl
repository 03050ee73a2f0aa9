{{- if and (has .Values.platform (list "kubeadm" "typhoon")) (ne .Release.Namespace "kube-system") }}
{{- fail (printf "platform %s takes the API server's address from a ConfigMap of kube-system, which pods of namespace %s cannot mount: install this chart with --namespace kube-system" .Values.platform .Release.Namespace) }}
{{- end }}
