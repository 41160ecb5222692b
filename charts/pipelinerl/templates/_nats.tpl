{{/* Name of the stream server's objects. */}}
{{- define "pipelinerl.nats" -}}
{{- printf "%s-nats" (include "pipelinerl.fullname" .) -}}
{{- end -}}

{{/* Secret that the operator makes: its seed, and the trust of nats-server. It is kept without the release, as the volumes are. */}}
{{- define "pipelinerl.natsAuth" -}}
{{- printf "%s-nats-auth" (include "pipelinerl.fullname" .) -}}
{{- end -}}

{{/* Labels by which the stream server's pods are found. */}}
{{- define "pipelinerl.natsSelector" -}}
{{ include "pipelinerl.selectorLabels" . }}
app.kubernetes.io/component: nats
{{- end -}}

{{/* The operator's login at the stream's server, and the certificates by which it trusts it. */}}
{{- define "pipelinerl.natsArgs" -}}
{{- if .Values.nats.enabled }}
- --nats-auth-secret={{ include "pipelinerl.natsAuth" . }}
{{- else }}
{{- with .Values.externalNats.credentialsSecret }}
{{- if .name }}
- --nats-credentials=/etc/pipelinerl/nats/login/{{ .key }}
{{- end }}
{{- end }}
{{- with .Values.externalNats.caSecret }}
{{- if .name }}
- --nats-ca-file=/etc/pipelinerl/nats/ca/{{ .key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volumes and mounts for an external server, in the operator's pods. */}}
{{- define "pipelinerl.natsVolumes" -}}
{{- if not .Values.nats.enabled }}
{{- with .Values.externalNats.credentialsSecret.name }}
- name: nats-login
  secret: {secretName: {{ . }}}
{{- end }}
{{- with .Values.externalNats.caSecret.name }}
- name: nats-ca
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pipelinerl.natsMounts" -}}
{{- if not .Values.nats.enabled }}
{{- with .Values.externalNats.credentialsSecret.name }}
- {name: nats-login, mountPath: /etc/pipelinerl/nats/login, readOnly: true}
{{- end }}
{{- with .Values.externalNats.caSecret.name }}
- {name: nats-ca, mountPath: /etc/pipelinerl/nats/ca, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* Bytes of "40Gi", "40G", or NATS's "40GB", which is as much as 40Gi. */}}
{{- define "pipelinerl.bytes" -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- $base := ternary 1000.0 1024.0 (regexMatch "^[kKMGTPE]$" $unit) -}}
{{- $value := regexFind "^[0-9.]+" . | float64 -}}
{{- range until (index (dict "" 0 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) ($unit | upper | trunc 1)) -}}
{{- $value = mulf $value $base -}}
{{- end -}}
{{- $value -}}
{{- end -}}

{{- define "pipelinerl.checkStore" -}}
{{- $store := .Values.nats.jetstream.fileStore -}}
{{- $size := .Values.nats.persistence.size -}}
{{- if and .Values.nats.persistence.enabled (gt (include "pipelinerl.bytes" $store | float64) (include "pipelinerl.bytes" $size | float64)) -}}
{{- fail (printf "nats.jetstream.fileStore=%s is more than nats.persistence.size=%s: make the volume larger, or the store smaller" $store $size) -}}
{{- end -}}
{{- end -}}
