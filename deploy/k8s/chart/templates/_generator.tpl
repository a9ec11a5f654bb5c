{{- define "headway.spec.generator" -}}
{{- $ := .root }}
{{- include "headway.model" (omit . "rdma") }}
containers:
  - name: generator
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- include "headway.command" . | nindent 4 }}
    env:
      {{- if eq $.Values.workload.as "sets" }}
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
      {{- else }}
      - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
      - {name: POD_NAME, value: "{{ include "headway.pods" . }}-$(POD_INDEX)"}
      {{- end }}
      - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
      {{- include "headway.env" . | nindent 6 }}
    {{- include "headway.envFrom" . | nindent 4 }}
    ports:
      - {name: http, containerPort: 7310}
    {{- include "headway.probes" . | nindent 4 }}
    {{- include "headway.walls" . | nindent 4 }}
    {{- include "headway.resources" . | nindent 4 }}
    volumeMounts:
      {{- include "headway.mounts" . | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
volumes:
  {{- include "headway.volumes" . | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $.Values.generator.sharedMemory }}}
{{- end }}

{{/* The chart's own variables of a generator. */}}
{{- define "headway.settings.generator" -}}
{{- $at := dict "root" $ "of" "generator" }}
{{- $learner := printf "%s://%s:7300" (include "headway.scheme" $at) (include "headway.name" (dict "root" $ "of" "learner")) }}
HEADWAY_GENERATOR__ID: $(POD_NAME)
HEADWAY_GENERATOR__DRAIN_S: {{ .Values.generator.drainSeconds }}
HEADWAY_GENERATOR__ENGINE__TENSOR_PARALLEL_SIZE: {{ .Values.generator.tensorParallelSize }}
{{- if .Values.tinker.enabled }}
HEADWAY_GENERATOR__ENGINE__MAX_MODEL_LEN: {{ .Values.tinker.contextTokens }}
HEADWAY_GENERATOR__JOIN__LEARNER: none
HEADWAY_GENERATOR__ADAPTERS__SLOTS: {{ .Values.tinker.slots }}
HEADWAY_GENERATOR__ADAPTERS__MAX_RANK: {{ .Values.tinker.maxRank }}
HEADWAY_GENERATOR__ADAPTERS__SOURCE: {{ $learner }}
HEADWAY_GENERATOR__ADAPTERS__TOKEN_FILE: /headway/keys/learner.token
{{- else }}
HEADWAY_GENERATOR__JOIN__LEARNER: {{ $learner }}
HEADWAY_GENERATOR__JOIN__BACKEND: {{ .Values.gpu.enabled | ternary "nccl" "gloo" }}
HEADWAY_GENERATOR__JOIN__TOKEN_FILE: /headway/keys/learner.token
{{- if .Values.tls.enabled }}
HEADWAY_GENERATOR__JOIN__URL: https://$(POD_NAME).{{ include "headway.subdomain" $at }}.$(POD_NAMESPACE).svc:7310
{{- end }}
{{- end }}
{{- end }}
