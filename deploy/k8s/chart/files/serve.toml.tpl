# A server of the Tinker API. Addresses, keys and tokens come from the chart, as environment variables.

[run]
name = "serve"

[learner]
model = {{ .Values.tinker.model | toJson }}

[generator]
model = {{ .Values.tinker.model | toJson }}

[generator.engine]
{{- if not .Values.gpu.enabled }}
dtype = "float32"    # as the learner trains, so that the logprobs of both agree
kv_cache_gb = 0.5
{{- end }}
max_num_seqs = 64
