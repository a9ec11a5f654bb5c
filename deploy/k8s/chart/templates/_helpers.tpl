{{/* Every helper takes (dict "root" $ "of" COMPONENT): COMPONENT is learner, learner-ranks, generator, reward-service or env-service. The pods' helpers also take what workloads.yaml knows of each component: see there. */}}

{{- define "headway.name" -}}
{{ .root.Release.Name | trunc 40 | trimSuffix "-" }}-{{ .of }}
{{- end }}

{{- define "headway.selector" -}}
app.kubernetes.io/name: headway
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .of }}
{{- end }}

{{- define "headway.labels" -}}
{{ include "headway.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "headway.image" -}}
{{- $of := .of | replace "learner-ranks" "learner" }}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}headway/{{ $of }}:{{ .root.Values.image.tag }}{{ with get .root.Values.image.digests $of }}@{{ . }}{{ end }}
{{- end }}

{{/* http or https, and the same in capitals for probes. */}}
{{- define "headway.scheme" -}}{{ if .root.Values.tls.enabled }}https{{ else }}http{{ end }}{{- end }}

{{/* What every pod's spec begins with. priority: learner or others. grace: seconds. values: the component's. */}}
{{- define "headway.pod" -}}
serviceAccountName: {{ include "headway.name" (dict "root" .root "of" (and .root.Values.runtimes.enabled (eq .of "env-service") | ternary "runtimes" "pods")) }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- if .values.priorityClassName }}
priorityClassName: {{ .values.priorityClassName }}
{{- else if .root.Values.priority.create }}
priorityClassName: {{ include "headway.name" (dict "root" .root "of" .priority) }}
{{- end }}
terminationGracePeriodSeconds: {{ .values.gracePeriodSeconds | default .grace }}
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.user.uid }}
  runAsUser: {{ int . }}
  {{- end }}
  {{- with .root.Values.user.gid }}
  runAsGroup: {{ int . }}
  {{- end }}
  {{- with .root.Values.user.fsGroup }}
  fsGroup: {{ int . }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "headway.affinity" . }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "headway.selector" . | nindent 8 }}
{{- end }}

{{/* The component's own affinity; else, where the claim of models is for one node, the node of the learner, which mounts it, too. */}}
{{- define "headway.affinity" -}}
{{- $models := .root.Values.storage.models }}
{{- $one := and (not $models.existingClaim) (not (has "ReadWriteMany" $models.accessModes)) (not (has "ReadOnlyMany" $models.accessModes)) }}
{{- if .values.affinity }}
affinity: {{- toYaml .values.affinity | nindent 2 }}
{{- else if and $one (ne .of "learner") }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "headway.selector" (dict "root" .root "of" "learner") | nindent 12 }}
{{- end }}
{{- end }}

{{/* A pod's metadata: labels of its own beside those that select it. */}}
{{- define "headway.metadata" -}}
{{- $labels := include "headway.labels" . | fromYaml }}
{{- range $name, $_ := .values.labels }}
{{- if hasKey $labels $name }}
{{- fail (printf "%s.labels: %s is the chart's own, by which its pods are found: take another name" $.key $name) }}
{{- end }}
{{- end }}
labels: {{- merge $labels .values.labels | toYaml | nindent 2 }}
{{- $annotations := deepCopy .values.annotations }}
{{- if eq .root.Values.workload.as "sets" }}{{ $_ := set $annotations "checksum/config" (include (print .root.Template.BasePath "/config.yaml") .root | sha256sum) }}{{ end }}
{{- with .root.Values.keys.revision }}{{ $_ := set $annotations "headway/keys-revision" . }}{{ end }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of pods with GPUs, which may be on the host's network. */}}
{{- define "headway.accelerated" -}}
{{- if .root.Values.network.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if and .root.Values.gpu.enabled .root.Values.gpu.runtimeClassName }}
runtimeClassName: {{ .root.Values.gpu.runtimeClassName }}
{{- end }}
{{- end }}

{{- define "headway.walls" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .rdma }}
    add: [IPC_LOCK]
    {{- end }}
{{- end }}

{{/* Requests and limits with GPUs and RDMA devices: (dict "root" "values" "gpus"). */}}
{{- define "headway.resources" -}}
{{- $devices := dict }}
{{- if and .root.Values.gpu.enabled .gpus }}{{ $_ := set $devices .root.Values.gpu.resource .gpus }}{{ end }}
{{- if and .gpus .root.Values.network.rdma.resource }}{{ $_ := set $devices .root.Values.network.rdma.resource .root.Values.network.rdma.count }}{{ end }}
resources:
  requests: {{- toYaml (merge (deepCopy .values.resources.requests) $devices) | nindent 4 }}
  limits: {{- toYaml (merge (deepCopy .values.resources.limits) $devices) | nindent 4 }}
{{- end }}

{{/* Alive: it answers, whomever it waits for. Ready: it waits for nobody. */}}
{{- define "headway.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ include "headway.scheme" . | upper }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .values.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ include "headway.scheme" . | upper }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ include "headway.scheme" . | upper }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* Of a reward or env service: a balancer forgets it before it takes nothing more. */}}
{{- define "headway.leave" -}}
lifecycle:
  preStop:
    exec: {command: [sleep, "3"]}
{{- end }}

{{/* A container's variables: those that the chart sets (.env, name: value), those of the component's values, which go before them, and all of .root.Values.network's. No secret may be among them. */}}
{{- define "headway.env" -}}
{{- $own := .values.env }}
{{- range $name, $value := $own }}
{{- if regexMatch "(TOKEN|PASSWORD|SECRET|API_KEY)$" $name }}
{{- fail (printf "%s.env: %s would be in the open: put it into a Secret, and name that in %s.envFrom" $.key $name $.key) }}
{{- end }}
{{- end }}
{{- range $name, $value := merge (deepCopy $own) .env (include "headway.http" . | fromYaml) (include "headway.collectives" . | fromYaml) }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- define "headway.envFrom" -}}
{{- with .values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* HTTP of a process: its address, token and certificates, as variables; prefix: HEADWAY_GENERATOR. */}}
{{- define "headway.http" -}}
{{- $of := .of | replace "learner-ranks" "learner" }}
{{ .prefix }}__HTTP__HOST: 0.0.0.0
{{ .prefix }}__HTTP__TOKEN_FILE: /headway/keys/{{ $of }}.token
{{- if .root.Values.tls.enabled }}
{{ .prefix }}__HTTP__TLS_CERT_FILE: /headway/tls/{{ $of }}.pem
{{ .prefix }}__HTTP__TLS_KEY_FILE: /headway/tls/{{ $of }}.key
{{ .prefix }}__HTTP__TLS_CA_FILE: /headway/tls/ca.pem
{{- end }}
{{- end }}

{{/* NCCL and gloo between pods. Where there are adapters for RDMA, NCCL is to fail without them, and not to take TCP in silence. */}}
{{- define "headway.collectives" -}}
{{- if .gpus }}
{{- $values := deepCopy .root.Values.network.nccl }}
{{- with .root.Values.network.interface }}
{{- $_ := set $values "NCCL_SOCKET_IFNAME" . }}
{{- $_ := set $values "GLOO_SOCKET_IFNAME" . }}
{{- end }}
{{- if .root.Values.network.rdma.resource }}{{ $values = merge $values (dict "NCCL_NET" "IB") }}{{ end }}
{{- toYaml $values }}
{{- end }}
{{- end }}

{{/* Volumes: run.toml, keys (of the Secret, those of `files`), certificates, /tmp, and the component's own; (dict ... "files" (list ...)). */}}
{{- define "headway.volumes" -}}
- name: config
  configMap: {name: {{ include "headway.name" (dict "root" .root "of" "run") }}}
- name: keys
  secret:
    secretName: {{ .root.Values.keys.secret }}
    defaultMode: 0400
    items:
      {{- range .files }}
      - {key: {{ . | replace "authorized/" "authorized-" }}, path: {{ . }}}
      {{- end }}
{{- if .root.Values.tls.enabled }}
{{- $of := .of | replace "learner-ranks" "learner" }}
- name: tls
  secret:
    secretName: {{ .root.Values.tls.secret }}
    defaultMode: 0400
    items:
      - {key: ca.pem, path: ca.pem}
      - {key: {{ $of }}.pem, path: {{ $of }}.pem}
      - {key: {{ $of }}.key, path: {{ $of }}.key}
{{- end }}
- name: tmp
  emptyDir: {}
- name: models
  persistentVolumeClaim:
    claimName: {{ .root.Values.storage.models.existingClaim | default (include "headway.name" (dict "root" .root "of" "models")) }}
{{- if .scripts }}
- name: scripts
  configMap: {name: {{ include "headway.name" (dict "root" .root "of" "scripts") }}}
{{- end }}
{{- range .values.secrets }}
- name: secret-{{ . }}
  secret: {secretName: {{ . }}, defaultMode: 0400}
{{- end }}
{{- with .values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headway.mounts" -}}
- {name: config, mountPath: /headway/config, readOnly: true}
- {name: keys, mountPath: /headway/keys, readOnly: true}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /headway/tls, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /headway/models, readOnly: true}
{{- if .scripts }}
- {name: scripts, mountPath: /headway/scripts, readOnly: true}
{{- end }}
{{- range .values.secrets }}
- {name: secret-{{ . }}, mountPath: /headway/secrets/{{ . }}, readOnly: true}
{{- end }}
{{- with .values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Waits until the learner's pod has made the demo's model. */}}
{{- define "headway.model" -}}
{{- if .root.Values.run.demo }}
initContainers:
  - name: model
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [sh, -c, "until test -e /headway/models/addition/.complete; do sleep 1; done"]
    {{- include "headway.walls" . | nindent 4 }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: models, mountPath: /headway/models, readOnly: true}
{{- end }}
{{- end }}

{{/* Of NetworkPolicies. */}}
{{- define "headway.peer" -}}
podSelector: {matchLabels: {app.kubernetes.io/name: headway, app.kubernetes.io/instance: {{ .root.Release.Name }}, app.kubernetes.io/component: {{ .of }}}}
{{- end }}
{{- define "headway.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "headway.name" . }}
  labels: {{- include "headway.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "headway.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end }}
{{- define "headway.names" -}}
- ports:  # names
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
{{/* What gloo and NCCL open for broadcasts is chosen by the system: net.ipv4.ip_local_port_range of a pod. */}}
{{- define "headway.chosen" -}}
- {protocol: TCP, port: 32768, endPort: 60999}
{{- end }}
{{- define "headway.scraped" -}}
{{- with .root.Values.network.monitoringNamespace }}
- from:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . }}}}
  ports:
    - {protocol: TCP, port: http}
{{- end }}
{{- end }}
