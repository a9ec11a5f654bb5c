{{- define "headway.spec.env-service" -}}
{{- $ := .root }}
{{- include "headway.model" . }}
containers:
  - name: env-service
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- include "headway.command" . | nindent 4 }}
    env:
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
      {{- if $.Values.runtimes.enabled }}
      - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
      {{- end }}
      {{- include "headway.env" . | nindent 6 }}
    {{- include "headway.envFrom" . | nindent 4 }}
    ports:
      - {name: http, containerPort: 7330}
    {{- include "headway.probes" . | nindent 4 }}
    {{- include "headway.leave" . | nindent 4 }}
    {{- include "headway.walls" . | nindent 4 }}
    {{- include "headway.resources" . | nindent 4 }}
    volumeMounts:
      {{- include "headway.mounts" . | nindent 6 }}
      {{- if $.Values.runtimes.enabled }}
      - {name: cluster, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
      {{- end }}
volumes:
  {{- include "headway.volumes" . | nindent 2 }}
  {{- if $.Values.runtimes.enabled }}
  - name: cluster
    projected:
      sources:
        - serviceAccountToken: {path: token, expirationSeconds: 3600}
        - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
  {{- end }}
{{- end }}

{{/* The chart's own variables of an env service. */}}
{{- define "headway.settings.env-service" -}}
{{- $at := dict "root" $ "of" "env-service" }}
HEADWAY_ENV_SERVICE__ENV_ID: $(POD_NAME)
HEADWAY_ENV_SERVICE__CAPACITY: {{ .Values.envService.capacity }}
HEADWAY_ENV_SERVICE__DRAIN_S: {{ .Values.envService.drainSeconds }}
HEADWAY_ENV_SERVICE__LEARNER: tcp://{{ include "headway.name" (dict "root" $ "of" "learner") }}:7301
HEADWAY_ENV_SERVICE__SECRET_KEY_FILE: /headway/keys/{{ .Values.keys.environment }}.key
HEADWAY_ENV_SERVICE__LEARNER_KEY_FILE: /headway/keys/learner.pub
HEADWAY_ENV_SERVICE__REWARD_URLS: {{ list (printf "%s://%s:7320" (include "headway.scheme" $at) (include "headway.name" (dict "root" $ "of" "reward-service"))) | toJson | quote }}
HEADWAY_ENV_SERVICE__GENERATOR_TOKEN_FILE: /headway/keys/generator.token
HEADWAY_ENV_SERVICE__REWARD_TOKEN_FILE: /headway/keys/reward-service.token
{{- if .Values.runtimes.enabled }}
HEADWAY_ENV_SERVICE__RUNTIMES__KIND: kubernetes
HEADWAY_ENV_SERVICE__RUNTIMES__KUBERNETES__NAMESPACE: {{ .Release.Namespace }}
HEADWAY_ENV_SERVICE__RUNTIMES__KUBERNETES__SERVICE: $(POD_NAME)
HEADWAY_ENV_SERVICE__RUNTIMES__KUBERNETES__OWNER_UID: $(POD_UID)
HEADWAY_ENV_SERVICE__RUNTIMES__KUBERNETES__SERVICE_ACCOUNT: {{ include "headway.name" (dict "root" $ "of" "pods") }}
{{- end }}
{{- end }}
