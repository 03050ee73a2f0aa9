          resources:
{{- with .Values.resources }}
            {{- toYaml . | nindent 12 }}
{{- else }}
            requests:
{{- if eq .Values.wireguard "auto" }}
              # Where the kernel has no WireGuard this container carries every packet to and from other locations.
              cpu: 100m
{{- else }}
              cpu: 20m
{{- end }}
              memory: 32Mi
{{- end }}
