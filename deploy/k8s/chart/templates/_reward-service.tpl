{{- define "headway.spec.reward-service" -}}
{{- $ := .root }}
{{- if .values.sandbox.enabled }}
hostUsers: false
{{- end }}
containers:
  - name: reward-service
    image: {{ include "headway.image" . }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- include "headway.command" . | nindent 4 }}
    env:
      {{- include "headway.env" . | nindent 6 }}
    {{- include "headway.envFrom" . | nindent 4 }}
    ports:
      - {name: http, containerPort: 7320}
    {{- include "headway.probes" . | nindent 4 }}
    {{- include "headway.leave" . | nindent 4 }}
    {{- include "headway.walls" . | nindent 4 }}
      {{- if .values.sandbox.enabled }}
      # A sandbox mounts a /proc of its own, which covered parts of this one forbid.
      procMount: Unmasked
      seccompProfile: {type: Localhost, localhostProfile: {{ .values.sandbox.seccompProfile }}}
      {{- end }}
    {{- include "headway.resources" . | nindent 4 }}
    volumeMounts:
      {{- include "headway.mounts" . | nindent 6 }}
volumes:
  {{- include "headway.volumes" . | nindent 2 }}
{{- end }}

{{/* The chart's own variables of a reward service. */}}
{{- define "headway.settings.reward-service" -}}
HEADWAY_REWARD_SERVICE__DRAIN_S: {{ .Values.rewardService.drainSeconds }}
HEADWAY_REWARD_SERVICE__SANDBOX: {{ .Values.rewardService.sandbox.enabled | ternary "required" "off" | quote }}
{{- end }}
