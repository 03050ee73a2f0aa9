{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
{# source #}
{{- end }}
