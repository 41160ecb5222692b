{{/* Name of the stream server's objects. */}}
{{- define "pipelinerl.nats" -}}
{{- printf "%s-nats" (include "pipelinerl.fullname" .) -}}
{{- end -}}

{{/* Secret that the operator makes: its seed, and what nats-server trusts. It outlives the release, as the volumes do. */}}
{{- define "pipelinerl.natsAuth" -}}
{{- printf "%s-nats-auth" (include "pipelinerl.fullname" .) -}}
{{- end -}}

{{/* Labels by which the stream server's pods are found. */}}
{{- define "pipelinerl.natsSelector" -}}
{{ include "pipelinerl.selectorLabels" . }}
app.kubernetes.io/component: nats
{{- end -}}

{{/* How the operator logs in at the stream's server. */}}
{{- define "pipelinerl.natsArgs" -}}
{{- if .Values.nats.enabled }}
- --nats-auth-secret={{ include "pipelinerl.natsAuth" . }}
{{- else }}
{{- with .Values.externalNats.credentialsSecret.name }}
- --nats-credentials=/etc/pipelinerl/nats/{{ $.Values.externalNats.credentialsSecret.key }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volume and mount of an external server's login, for the operator's pods. */}}
{{- define "pipelinerl.natsVolumes" -}}
{{- if and (not .Values.nats.enabled) .Values.externalNats.credentialsSecret.name }}
- name: nats-login
  secret: {secretName: {{ .Values.externalNats.credentialsSecret.name }}}
{{- end }}
{{- end -}}

{{- define "pipelinerl.natsMounts" -}}
{{- if and (not .Values.nats.enabled) .Values.externalNats.credentialsSecret.name }}
- {name: nats-login, mountPath: /etc/pipelinerl/nats, readOnly: true}
{{- end }}
{{- end -}}
