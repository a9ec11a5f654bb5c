{{/* Values that each make sense, and not together. */}}
{{- define "headway.refusals" -}}
{{- $several := gt (int .Values.learner.pods) 1 }}
{{- range $name := list "runs" "models" }}
{{- $volume := get $.Values.storage $name }}
{{- if and $several (not $volume.existingClaim) (not (has "ReadWriteMany" $volume.accessModes)) }}
{{- fail (printf "learner.pods > 1: ranks on several nodes use one folder: storage.%s.accessModes must have ReadWriteMany, or storage.%s.existingClaim name such a claim" $name $name) }}
{{- end }}
{{- end }}
{{- if and $several .Values.run.demo }}
{{- fail "learner.pods > 1: run.demo makes a model for one node: set run.demo=false, and put a model into storage.models" }}
{{- end }}
{{- if .Values.tinker.enabled }}
{{- if or $several (gt (int .Values.learner.ranksPerPod) 1) }}
{{- fail "tinker.enabled: the chart gives a server of the Tinker API one rank: set learner.pods=1 and learner.ranksPerPod=1" }}
{{- end }}
{{- if ne .Values.workload.as "sets" }}
{{- fail (printf "tinker.enabled: a server has no end, and workload.as=%s is for what has one: set workload.as=sets" .Values.workload.as) }}
{{- end }}
{{- if .Values.generator.autoscaling.enabled }}
{{- fail "tinker.enabled: the server knows its generators by name: set generator.replicas, and generator.autoscaling.enabled=false" }}
{{- end }}
{{- end }}
{{- if and .Values.monitoring.serviceMonitors .Values.network.policies (not .Values.network.monitoringNamespace) }}
{{- fail "monitoring.serviceMonitors: the chart's NetworkPolicies keep Prometheus out, so every process would seem to be down: set network.monitoringNamespace to its namespace" }}
{{- end }}
{{- if ne .Values.workload.as "sets" }}
{{- range $key := list "generator" "rewardService" "envService" }}
{{- if (get $.Values $key).autoscaling.enabled }}
{{- fail (printf "workload.as=%s: pods of a Job are not scaled by load: set %s.replicas, and %s.autoscaling.enabled=false" $.Values.workload.as $key $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
