{{/* Serve's configuration: deploy/serve/attend.yaml, or autoscaling.yaml, with the values' numbers. */}}
{{- define "attend.serve" -}}
# The one Serve configuration: `serve run deploy/serve/attend.yaml` on a laptop, and word for word the RayService's
# serveConfigV2, where kustomize copies it. What shapes the process (device, memory, threads) stays in ATTEND_* variables:
# an argument given here would win over them without a word.
proxy_location: EveryNode
http_options:
  host: 0.0.0.0 # a pod's Service must reach it; on a laptop this opens the port to the network
  port: 8000
  request_timeout_s: {{ add .Values.requestTimeoutSeconds 15 }} # Serve cuts a stream without a reason, so Attend's own limit ({{ .Values.requestTimeoutSeconds }}) comes first
  keep_alive_timeout_s: 75 # longer than the 60 s that load balancers keep idle connections
grpc_options:
  port: 9000
  request_timeout_s: {{ add .Values.requestTimeoutSeconds 15 }}
  grpc_servicer_functions:
  - attend.service.grpc_api.register.add_generation_service
  - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
logging_config: {encoding: JSON, enable_access_log: false} # Attend logs each request itself
applications:
- name: default
  route_prefix: /
  import_path: attend.service.runtime.deployment:build
  args: {request_timeout_seconds: {{ .Values.requestTimeoutSeconds }}, drain_seconds: {{ .Values.drainSeconds }}}
  # What is left out here the builder works out from the settings. Above all ray_actor_options: given here, they would
  # replace the builder's, and its GPU with them.
  deployments:
  - name: Attend
{{- if .Values.autoscaling.enabled }}
    autoscaling_config:
      min_replicas: {{ .Values.replicas }}
      max_replicas: {{ .Values.autoscaling.maxReplicas }}
      policy: {policy_function: "attend.service.observe.autoscaling:policy"} # places, KV blocks and queues, instead of Serve's count
      look_back_period_s: 15
      upscale_delay_s: 15
      downscale_delay_s: 600 # a replica is dear to start: weights, and a node
{{- else }}
    num_replicas: {{ .Values.replicas }} # with one, a crash is an outage of some ten seconds
{{- end }}
    max_surge_percent: 0 # an old replica ends before its successor starts, which needs its place
    rolling_update_percentage: {{ divf 1 .Values.replicas }} # one at a time
{{ end }}
