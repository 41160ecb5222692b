{{/* Name of all rendered objects: it contains the release's name, so that one namespace can hold two releases. */}}
{{- define "pipelinerl.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of cluster-wide objects: it contains the namespace, since it must be unique in the cluster. */}}
{{- define "pipelinerl.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "pipelinerl.fullname" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "pipelinerl.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object; call with (dict "root" $ "component" "operator"). */}}
{{- define "pipelinerl.labels" -}}
{{ include "pipelinerl.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: pipelinerl
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image's full name; call with (dict "root" $ "image" .Values.operator.image). */}}
{{- define "pipelinerl.image" -}}
{{- $registry := default .root.Values.image.registry .image.registry -}}
{{- $name := .image.repository -}}
{{- if $registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" $registry) .image.repository -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "pipelinerl.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pipelinerl.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* host:port of the weight-transfer coordinator, as pods in any namespace reach it. */}}
{{- define "pipelinerl.coordinator" -}}
{{- printf "%s-coordinator.%s.svc:50052" (include "pipelinerl.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* URL of the sample stream's server, as pods in any namespace reach it. */}}
{{- define "pipelinerl.natsUrl" -}}
{{- if .Values.nats.enabled -}}
{{- if .Values.externalNats.url -}}
{{- fail (printf "externalNats.url=%s is never used with nats.enabled=true: set nats.enabled=false too" .Values.externalNats.url) -}}
{{- end -}}
{{- printf "nats://%s-nats.%s.svc:4222" (include "pipelinerl.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- required "externalNats.url is empty: with nats.enabled=false it names the NATS to use, for example nats://nats.messaging.svc:4222" .Values.externalNats.url -}}
{{- end -}}
{{- end -}}

{{/* policy/v1 came with Kubernetes 1.21, which is also when v1beta1 was deprecated. */}}
{{- define "pipelinerl.pdbVersion" -}}
{{- if semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version -}}policy/v1{{- else -}}policy/v1beta1{{- end -}}
{{- end -}}

{{- define "pipelinerl.operatorArgs" -}}
- --lease={{ include "pipelinerl.fullname" . }}
- --coordinator={{ include "pipelinerl.coordinator" . }}
- --nats-url={{ include "pipelinerl.natsUrl" . }}
{{- include "pipelinerl.natsArgs" . }}
- --metrics-listen=0.0.0.0:8080
- --log-level={{ .Values.operator.logLevel }}
- --actor-image={{ include "pipelinerl.image" (dict "root" $ "image" .Values.actor.image) }}
- --trainer-image={{ include "pipelinerl.image" (dict "root" $ "image" .Values.trainer.image) }}
- --preprocessor-image={{ include "pipelinerl.image" (dict "root" $ "image" .Values.preprocessor.image) }}
- --image-pull-policy={{ .Values.image.pullPolicy }}
- --operator-label=app.kubernetes.io/instance={{ .Release.Name }}
- --operator-label=app.kubernetes.io/component=operator
{{- if not .Values.networkPolicy.enabled }}
- --no-network-policy
{{- end }}
{{- range .Values.watchNamespaces }}
- --namespace={{ . }}
{{- end }}
{{- range .Values.operator.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Rights in the operator's own namespace: OWN_NAMESPACE of pipelinerl_operator/kube/resources.py. */}}
{{- define "pipelinerl.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "pipelinerl.fullname" . }}]
  verbs: [get, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch]
{{- end -}}

{{/* Rights in the namespaces whose jobs the operator runs: JOB_NAMESPACES and GANG_NAMESPACES of the same file. */}}
{{- define "pipelinerl.jobRules" -}}
- apiGroups: [pipelinerl.dev]
  resources: [pipelinerljobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [pipelinerl.dev]
  resources: [pipelinerljobs/status]
  verbs: [patch]
- apiGroups: [pipelinerl.dev]
  resources: [pipelinerljobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.rbac.gangScheduling }}
- apiGroups: [scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end -}}
