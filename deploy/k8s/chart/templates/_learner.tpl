{{/* What differs in a learner's pods: rank 0's host (.leads), and the hosts of further ranks. */}}
{{- define "headway.spec.learner" -}}
{{- $ := .root }}
{{- $several := gt (int $.Values.learner.pods) 1 }}
{{- if and .leads $.Values.run.demo }}
initContainers:
  - name: model
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    command: [sh, /headway/scripts/make-model.sh]
    {{- include "headway.walls" . | nindent 4 }}
    resources: {{- toYaml $.Values.learner.resources | nindent 6 }}
    volumeMounts:
      - {name: scripts, mountPath: /headway/scripts, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: models, mountPath: /headway/models}
      - {name: runs, mountPath: /headway/runs}
{{- end }}
containers:
  - name: learner
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- if $.Values.tinker.enabled }}
    args: [--config, /headway/config/run.toml]
    {{- else }}
    command: {{- include "headway.training" . | nindent 6 }}
    {{- end }}
    env:
      {{- if $several }}
      - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      {{- if eq $.Values.workload.as "sets" }}
      - {name: NODE_RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
      {{- else }}
      - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
      {{- end }}
      {{- end }}
      {{- include "headway.env" . | nindent 6 }}
    {{- include "headway.envFrom" . | nindent 4 }}
    ports:
      {{- if .leads }}
      - {name: http, containerPort: 7300}
      {{- if not $.Values.tinker.enabled }}
      - {name: leases, containerPort: 7301}
      - {name: weights, containerPort: 7302}
      {{- end }}
      {{- end }}
      {{- if $several }}
      - {name: ranks, containerPort: 29500}
      {{- end }}
    {{- if .leads }}
    {{- include "headway.probes" . | nindent 4 }}
    {{- else }}
    # It serves no HTTP. Ranks that wait for rank 0 are alive; those that have lost it and hang are not.
    startupProbe:
      exec: {command: [python3, /headway/scripts/ranks.py, alive]}
      periodSeconds: 5
      timeoutSeconds: 10
      failureThreshold: 12
    livenessProbe:
      exec: {command: [python3, /headway/scripts/ranks.py, alive]}
      periodSeconds: 20
      timeoutSeconds: 10
      failureThreshold: 6
    readinessProbe:
      exec: {command: [python3, /headway/scripts/ranks.py, ready]}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 2
    {{- end }}
    {{- include "headway.walls" . | nindent 4 }}
    {{- include "headway.resources" . | nindent 4 }}
    volumeMounts:
      {{- include "headway.mounts" . | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
      - {name: runs, mountPath: /headway/runs}
      {{- if and $.Values.tinker.enabled $.Values.tinker.keysSecret }}
      - {name: tenants, mountPath: /headway/tenants, readOnly: true}
      {{- end }}
volumes:
  {{- include "headway.volumes" . | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $.Values.learner.sharedMemory }}}
  - name: runs
    persistentVolumeClaim:
      claimName: {{ $.Values.storage.runs.existingClaim | default (include "headway.name" (dict "root" $ "of" "runs")) }}
  {{- if and $.Values.tinker.enabled $.Values.tinker.keysSecret }}
  - name: tenants
    secret:
      secretName: {{ $.Values.tinker.keysSecret }}
      defaultMode: 0400
      items:
        - {key: tinker-keys.json, path: tinker-keys.json}
  {{- end }}
{{- end }}

{{/* The command of a pod that trains a run: what it does at the run's end is by what it is made as. */}}
{{- define "headway.training" -}}
{{- $ := .root }}
{{- $several := gt (int $.Values.learner.pods) 1 }}
{{- $sets := eq $.Values.workload.as "sets" }}
{{- if or $sets .leads }}
- python3
- /headway/scripts/to_its_end.py
{{- if .leads }}
- --answer
- "7300"
{{- if not $sets }}
- --for
- {{ $.Values.workload.farewellSeconds | toString | quote }}
{{- end }}
{{- end }}
{{- else }}
- sh
- -c
- export PET_NODE_RANK=`expr $POD_INDEX + 1`; exec "$@"
- ranks
{{- end }}
{{- if $several }}
# Who loses a rank ends, and the kubelet starts its pod's ranks again, all of them in the same attempt.
- python3
- -m
- torch.distributed.run
- --nnodes={{ $.Values.learner.pods }}
- --nproc-per-node={{ $.Values.learner.ranksPerPod }}
{{- if $sets }}
- --node-rank=$(NODE_RANK)
{{- else if .leads }}
- --node-rank=0
{{- end }}
- --master-addr={{ .leads | ternary "$(POD_IP)" (include "headway.name" (dict "root" $ "of" "learner")) }}
- --master-port=29500
- --max-restarts=0
- --no-python
{{- end }}
- learner
- --config
- /headway/config/run.toml
{{- end }}

{{/* The chart's own variables of a learner. */}}
{{- define "headway.settings.learner" -}}
HEADWAY_RUN__DIRECTORY: /headway/runs
{{- if .Values.tinker.enabled }}
{{- $generators := list }}
{{- $name := include "headway.name" (dict "root" $ "of" "generator") }}
{{- range $number := until (int .Values.generator.replicas) }}
{{- $generators = append $generators (printf "%s://%s-%d.%s%s:7310" (include "headway.scheme" (dict "root" $)) $name $number $name ($.Values.tls.enabled | ternary (printf ".%s.svc" $.Release.Namespace) "")) }}
{{- end }}
HEADWAY_LEARNER__TINKER__ENABLED: "true"
HEADWAY_LEARNER__TINKER__CONTEXT_TOKENS: {{ .Values.tinker.contextTokens }}
HEADWAY_LEARNER__TINKER__GENERATORS: {{ toJson $generators | quote }}
{{- with .Values.tinker.baseModel }}
HEADWAY_LEARNER__TINKER__BASE_MODEL: {{ . | quote }}
{{- end }}
{{- if .Values.tinker.keysSecret }}
HEADWAY_LEARNER__TINKER__KEYS_FILE: /headway/tenants/tinker-keys.json
{{- end }}
{{- else }}
HEADWAY_LEARNER__RESUME: auto
HEADWAY_LEARNER__RANKS: {{ gt (int .Values.learner.pods) 1 | ternary 1 (int .Values.learner.ranksPerPod) }}
HEADWAY_LEARNER__LEASES__ADDRESS: tcp://0.0.0.0:7301
HEADWAY_LEARNER__LEASES__SECRET_KEY_FILE: /headway/keys/learner.key
HEADWAY_LEARNER__LEASES__AUTHORIZED_KEYS: /headway/keys/authorized
HEADWAY_LEARNER__WEIGHTS__BACKEND: {{ .Values.gpu.enabled | ternary "nccl" "gloo" }}
HEADWAY_LEARNER__WEIGHTS__PORT: 7302
HEADWAY_LEARNER__WEIGHTS__GENERATOR_HOSTS: {{ toJson .Values.network.generatorHosts | quote }}
{{- end }}
HEADWAY_LEARNER__WEIGHTS__GENERATOR_TOKEN_FILE: /headway/keys/generator.token
{{- end }}
