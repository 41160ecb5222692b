{{/* Fills what stands between @ in a generated file; call with (dict "root" $ "file" "alerts/prometheus.yaml"). */}}
{{- define "pipelinerl.filled" -}}
{{- $text := .root.Files.Get .file -}}
{{- range $name, $value := .root.Values.prometheusRule.thresholds -}}
{{- $text = replace (printf "@%s@" $name) (toString $value) $text -}}
{{- end -}}
{{- $docs := default "docs/pages" (trimSuffix "/" .root.Values.docsUrl) -}}
{{- $text = replace "@runbooksUrl@" (printf "%s/how-to/runbooks.md" $docs) $text -}}
{{- $text = replace "@docsUrl@" $docs $text -}}
{{- replace "@datasourceUid@" .root.Values.grafana.alerts.datasourceUid $text -}}
{{- end -}}
