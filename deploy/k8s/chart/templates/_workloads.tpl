{{/* What pods are made by: sets (StatefulSets, Deployments), Jobs, or one JobSet of such. Each takes, beside root and of:
key, values: the component's among the values.  replicas, set, first: of its set.  priority, grace, prefix, gpus, rdma: of its pods.
spec: which of the headway.spec's.  env: the chart's own variables.  files: its keys.  scripts: it runs one.  leads: it is rank 0's. */}}

{{- define "headway.object" -}}
name: {{ include "headway.name" . }}
labels:
  {{- include "headway.labels" . | nindent 2 }}
  {{- include "headway.queue" . | nindent 2 }}
{{- end }}

{{- define "headway.queue" -}}
{{- with .root.Values.workload.queue }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- end }}

{{- define "headway.template" -}}
metadata:
  {{- include "headway.metadata" . | nindent 2 }}
spec:
  {{- if ne .root.Values.workload.as "sets" }}
  restartPolicy: OnFailure
  {{- end }}
  {{- if eq .root.Values.workload.as "jobs" }}
  subdomain: {{ include "headway.subdomain" . }}
  {{- end }}
  {{- include "headway.pod" . | nindent 2 }}
  {{- if .gpus }}
  {{- include "headway.accelerated" . | nindent 2 }}
  {{- end }}
  {{- include (printf "headway.spec.%s" .spec) . | nindent 2 }}
{{- end }}

{{- define "headway.set" -}}
apiVersion: apps/v1
kind: {{ .set }}
metadata:
  {{- include "headway.object" . | nindent 2 }}
spec:
  {{- if eq .set "StatefulSet" }}
  serviceName: {{ include "headway.name" . }}
  podManagementPolicy: Parallel
  {{- end }}
  {{- if not (dig "autoscaling" "enabled" false .values) }}
  replicas: {{ .replicas }}
  {{- end }}
  {{- with .first }}
  ordinals: {start: {{ . }}}  # the node's rank for torchrun
  {{- end }}
  selector:
    matchLabels: {{- include "headway.selector" . | nindent 6 }}
  template:
    {{- include "headway.template" . | nindent 4 }}
{{- end }}

{{- define "headway.job" -}}
completions: {{ .replicas }}
parallelism: {{ .replicas }}
completionMode: Indexed
backoffLimit: {{ .root.Values.workload.backoffLimit }}
{{- if and (eq .root.Values.workload.as "jobs") (ne .root.Values.workload.ttlSeconds nil) }}
ttlSecondsAfterFinished: {{ int .root.Values.workload.ttlSeconds }}
{{- end }}
template:
  {{- include "headway.template" . | nindent 2 }}
{{- end }}

{{/* What pods of a Job, or of a Job of a JobSet, are called before their number, and within which name they are found. */}}
{{- define "headway.pods" -}}
{{- if eq .root.Values.workload.as "jobset" }}{{ include "headway.name" (dict "root" .root "of" "run") }}-{{ .of }}-0{{ else }}{{ include "headway.name" . }}{{ end }}
{{- end }}
{{- define "headway.subdomain" -}}
{{- if eq .root.Values.workload.as "jobset" }}{{ include "headway.name" (dict "root" .root "of" "run") }}{{ else }}{{ include "headway.name" . }}{{ end }}
{{- end }}

{{/* Of a process beside the learner: in a Job it ends when the learner says that the run is over. */}}
{{- define "headway.command" -}}
{{- if .scripts }}
command:
  - python3
  - /headway/scripts/to_its_end.py
  - --with
  - {{ include "headway.scheme" . }}://{{ include "headway.name" (dict "root" .root "of" "learner") }}:7300
  - --patience
  - {{ .root.Values.workload.patienceSeconds | toString | quote }}
  {{- if .root.Values.tls.enabled }}
  - --ca
  - /headway/tls/ca.pem
  {{- end }}
  - {{ .of }}
{{- end }}
args: [--config, /headway/config/run.toml]
{{- end }}
