{{/* What several templates need. */}}

{{/* Whether the pods that serve run Ray Serve. */}}
{{- define "attend.ray" -}}
{{- if or (eq .Values.mode "rayservice") (gt (int .Values.replicasPerPod) 1) (gt (int .Values.tensorParallel) 1) }}yes{{ end }}
{{- end }}

{{/* The label of our pods. Those of Ray have KubeRay's app.kubernetes.io/name, by which its own Services find them. */}}
{{- define "attend.label" -}}
{{ eq .Values.mode "rayservice" | ternary "app" "app.kubernetes.io/name" }}: attend
{{- end }}

{{/* GPUs of a pod that serves. */}}
{{- define "attend.gpus" -}}
{{- if .Values.gpu.enabled }}{{ mul .Values.tensorParallel .Values.replicasPerPod }}{{ else }}0{{ end }}
{{- end }}

{{/* Seconds that a node, or a pod that is one, waits for its replicas; and that its pod has from the signal on. */}}
{{- define "attend.nodeDrain" -}}
{{- if eq .Values.mode "rayservice" }}{{ add .Values.drainSeconds 1 (.Values.autoscaling.enabled | ternary .Values.successorSeconds 15) }}{{ else }}{{ .Values.drainSeconds }}{{ end }}
{{- end }}
{{- define "attend.grace" -}}
{{- if eq .Values.mode "rayservice" }}{{ add (include "attend.nodeDrain" .) 40 }}{{ else }}{{ add (include "attend.linger" .) .Values.drainSeconds 50 }}{{ end }}
{{- end }}

{{/* standalone: seconds in which callers move to other pods, once a pod is told to end. */}}
{{- define "attend.linger" -}}
{{- if hasKey .Values.settings "linger_seconds" }}{{ .Values.settings.linger_seconds }}{{ else }}10{{ end }}
{{- end }}

{{/* Seconds that a download may take before anybody gives up waiting for pods; no probe ends them meanwhile. */}}
{{- define "attend.download" -}}
{{- eq .Values.model.source "hub" | ternary 7200 0 }}
{{- end }}

{{- define "attend.image" -}}
{{- $image := .root.Values.image }}
{{- $tag := $image.tag | default .root.Chart.AppVersion }}
{{- $digest := $image.digest }}
{{- if .gpu }}{{ $tag = $image.gpuTag | default (printf "%s-gpu" $tag) }}{{ $digest = $image.gpuDigest }}{{ end }}
{{- if $digest }}{{ $image.repository }}@{{ $digest }}{{ else }}{{ $image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{/* image, imagePullPolicy, security and the end's message of each container. */}}
{{- define "attend.container" -}}
{{ include "attend.basics" (dict "root" .root "image" (include "attend.image" .)) }}
{{- end }}
{{- define "attend.basics" -}}
image: {{ .image }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
# A wrong setting ends the process with one sentence, which becomes the pod's termination message.
terminationMessagePolicy: FallbackToLogsOnError
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* What each pod has beside its containers. */}}
{{- define "attend.pod" -}}
# Kubernetes would add variables named after each Service in the namespace, such as ATTEND_PORT=tcp://...
enableServiceLinks: false
# OnRootMismatch: else each start changes the owner of every file of a volume.
securityContext:
  {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Where the pods that serve may run. `keys`: labels that tell updates apart. */}}
{{- define "attend.places" -}}
{{- $selector := include "attend.label" . | fromYaml }}
{{- if eq .Values.mode "rayservice" }}{{ $_ := set $selector "ray.io/node-type" "worker" }}{{ end }}
{{- $own := eq .Values.mode "rayservice" | ternary "ray.io/cluster" "pod-template-hash" }}
topologySpreadConstraints:
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
{{- if eq .Values.spread.hosts "require" }}
  whenUnsatisfiable: DoNotSchedule
  minDomains: 2
{{- else }}
  whenUnsatisfiable: ScheduleAnyway
{{- end }}
  # While an update runs there are two generations: each is spread by itself.
  matchLabelKeys: [{{ $own }}]
  labelSelector: {matchLabels: {{ toJson $selector }}}
{{- if .Values.spread.zones }}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [{{ $own }}]
  labelSelector: {matchLabels: {{ toJson $selector }}}
{{- end }}
{{- with merge (dict) (ternary .Values.gpu.nodeSelector dict .Values.gpu.enabled) .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- if .Values.gpu.enabled }}
{{- with .Values.gpu.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "attend.resources" -}}
{{- $own := .Values.resources }}
{{- $requests := dict "cpu" (toString ($own.cpuRequest | default $own.cpu)) "memory" ($own.memoryRequest | default $own.memory) }}
{{- $limits := dict "memory" $own.memory }}
{{- with $own.ephemeralStorage }}{{ $_ := set $requests "ephemeral-storage" . }}{{ end }}
{{- $gpus := include "attend.gpus" . }}
{{- if ne $gpus "0" }}{{ $_ := set $requests .Values.gpu.resource $gpus }}{{ $_ := set $limits .Values.gpu.resource $gpus }}{{ end -}}
{{ dict "requests" $requests "limits" $limits | toJson }}
{{- end }}

{{/* Volumes of the pods that serve, and where each is mounted. */}}
{{- define "attend.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if and (eq .Values.mode "standalone") (include "attend.ray" .) }}
# Ray's object store, and what the ranks of a replica hand each other; the default of 64 MiB is too small.
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ gt (int .Values.tensorParallel) 1 | ternary "1Gi" "256Mi" }}}}
{{- end }}
{{- if eq .Values.model.source "claim" }}
- {name: weights, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- else if eq .Values.model.source "oci" }}
- {name: weights, image: {reference: {{ .Values.model.image | quote }}}}
{{- else if eq .Values.model.source "hub" }}
{{- if .Values.model.claim }}
- {name: weights, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}}
{{- else if eq .Values.model.volume "emptyDir" }}
- {name: weights, emptyDir: {sizeLimit: {{ .Values.model.size }}}}
{{- else }}
- name: weights
  {{- include "attend.ephemeral" (dict "root" . "size" .Values.model.size) | nindent 2 }}
{{- end }}
{{- end }}
{{- if .Values.keys.existingSecret }}
- {name: api-keys, secret: {secretName: {{ .Values.keys.existingSecret }}, defaultMode: 288}} # 0440
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ .Values.tls.existingSecret }}, defaultMode: 288}} # 0440
{{- end }}
{{- if eq .Values.kvDisk.volume "emptyDir" }}
- {name: kv-disk, emptyDir: {sizeLimit: {{ include "attend.diskSize" . }}}}
{{- else if eq .Values.kvDisk.volume "ephemeral" }}
- name: kv-disk
  {{- include "attend.ephemeral" (dict "root" . "size" (include "attend.diskSize" .)) | nindent 2 }}
{{- else if eq .Values.kvDisk.volume "claim" }}
- {name: kv-disk, persistentVolumeClaim: {claimName: {{ .Values.kvDisk.claim }}}}
{{- end }}
{{- end }}

{{- define "attend.ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .root.Values.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* A volume a tenth larger than the folder's bound, in MiB: files have names and ends. */}}
{{- define "attend.diskSize" -}}
{{- $unit := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 }}
{{- $number := regexFind "^[0-9]+" .Values.kvDisk.size | int64 }}
{{- div (mul $number (get $unit (regexFind "[MGT]i$" .Values.kvDisk.size)) 11) 10 }}Mi
{{- end }}

{{- define "attend.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if and (eq .Values.mode "standalone") (include "attend.ray" .) }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if ne .Values.model.source "image" }}
- {name: weights, mountPath: /weights, readOnly: true}
{{- end }}
{{- if .Values.keys.existingSecret }}
# The whole folder: a mount by subPath would never see a change.
- {name: api-keys, mountPath: /etc/attend, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/attend-tls, readOnly: true}
{{- end }}
{{- if ne .Values.kvDisk.volume "none" }}
- {name: kv-disk, mountPath: /var/lib/attend}
{{- end }}
{{- end }}

{{/* Folder of a checkpoint of the hub below /weights. In a claim, which outlives the release, it has the reference's name. */}}
{{- define "attend.folder" -}}
{{- if .Values.model.claim }}{{ regexReplaceAll "[/@]" (trimPrefix "hf://" .Values.model.reference) "--" }}{{ else }}model{{ end }}
{{- end }}

{{/* Init container that brings the checkpoint from the hub, or waits for the Job that does. */}}
{{- define "attend.weights" -}}
{{- if and (eq .Values.model.source "hub") .Values.model.claim }}
{{- $folder := printf "/weights/%s" (include "attend.folder" .) }}
- name: wait
  {{- include "attend.container" (dict "root" . "gpu" .Values.gpu.enabled) | nindent 2 }}
  # The Job puts the folder there when it is whole.
  command: [sh, -c, "until test -e {{ $folder }}; do echo 'waiting for {{ $folder }}, which a Job downloads'; sleep 5; done"]
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts: [{name: weights, mountPath: /weights, readOnly: true}]
{{- else if eq .Values.model.source "hub" }}
- {{ include "attend.pull" . | nindent 2 | trim }}
{{- end }}
{{- end }}

{{/* The container that downloads. */}}
{{- define "attend.pull" -}}
name: weights
{{ include "attend.container" (dict "root" . "gpu" (and .Values.gpu.enabled (not .Values.model.claim))) }}
{{- if .Values.model.claim }}
# A folder that is there is whole, and may be served: a branch that has moved since does not change it.
command: [sh, -c, "test -e /weights/{{ include "attend.folder" . }} || exec attend pull {{ .Values.model.reference }} /weights/{{ include "attend.folder" . }}"]
{{- else }}
command: [attend, pull, {{ .Values.model.reference | quote }}, /weights/{{ include "attend.folder" . }}]
{{- end }}
env:
- {name: HF_HOME, value: /weights/hub}
- {name: HF_XET_CHUNK_CACHE_SIZE_BYTES, value: "0"} # nothing is downloaded twice, and the volume is not larger than the weights
{{- with .Values.model.tokenSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {memory: 1Gi}}
volumeMounts: [{name: tmp, mountPath: /tmp}, {name: weights, mountPath: /weights}]
{{- end }}

{{/* The Job that fills a claim. A Job cannot be changed: another reference or image is another Job. */}}
{{- define "attend.jobSpec" -}}
backoffLimit: 20 # what is downloaded is kept
template:
  metadata:
    labels: {app.kubernetes.io/name: attend-pull}
  spec:
    {{- include "attend.pod" . | nindent 4 }}
    restartPolicy: OnFailure
    automountServiceAccountToken: false
    serviceAccountName: attend
    containers:
    - {{ include "attend.pull" . | nindent 6 | trim }}
    volumes:
    - {name: tmp, emptyDir: {}}
    - {name: weights, persistentVolumeClaim: {claimName: {{ .Values.model.claim }}}}
{{- end }}
{{- define "attend.jobName" -}}
attend-pull-{{ include "attend.jobSpec" . | sha256sum | trunc 10 }}
{{- end }}

{{/* What does not go together, in a sentence: a schema would name the value alone. */}}
{{- define "attend.check" -}}
{{- $own := .Values }}
{{- $ranks := mul $own.tensorParallel $own.replicasPerPod | int }}
{{- $cpus := int $own.resources.cpu }}
{{- $ray := eq $own.mode "rayservice" }}
{{- if and (include "attend.ray" .) $own.tls.existingSecret }}
{{- fail "tls.existingSecret needs mode: standalone, with tensorParallel and replicasPerPod 1: Ray Serve speaks no TLS; let it end at the gateway" }}
{{- end }}
{{- if and $ray (gt (int $own.replicasPerPod) 1) }}
{{- fail "replicasPerPod needs mode: standalone: a worker of a RayService holds one replica" }}
{{- end }}
{{- if and (eq $own.model.source "oci") (semverCompare "<1.33-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.source: oci needs Kubernetes 1.33 with the feature gate ImageVolume, or 1.35; this is %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if $own.loadTest.enabled }}
{{- if and $own.tls.existingSecret (not $own.loadTest.target) }}{{ fail "loadTest.target is needed with tls.existingSecret: the certificate has its host's name" }}{{ end }}
{{- if and $own.keys.existingSecret (not $own.loadTest.keySecret) }}{{ fail "loadTest.keySecret is needed with keys.existingSecret" }}{{ end }}
{{- end }}
{{- if and $ray (hasKey $own.settings "linger_seconds") }}{{ fail "settings.linger_seconds needs mode: standalone: in a RayService Serve moves callers away by itself" }}{{ end }}
{{- if and (not $ray) $own.redis.address }}{{ fail "redis.address needs mode: rayservice: standalone pods keep no state of Ray's" }}{{ end }}
{{- if and (not $ray) $own.gpu.enabled $own.autoscaling.enabled (ne $own.autoscaling.by "keda") }}
{{- fail "autoscaling.by: cpu says nothing of a GPU: autoscaling.by: keda" }}
{{- end }}
{{- if lt $cpus $ranks }}{{ fail (printf "resources.cpu is %d: tensorParallel x replicasPerPod is %d" $cpus $ranks) }}{{ end }}
{{- if lt (int $own.drainSeconds) (int $own.requestTimeoutSeconds) }}{{ fail "drainSeconds is less than requestTimeoutSeconds" }}{{ end }}
{{- if and $own.autoscaling.enabled (lt (int $own.autoscaling.maxReplicas) (int $own.replicas)) }}
{{- fail "autoscaling.maxReplicas is less than replicas" }}
{{- end }}
{{- end }}

{{/* The ConfigMap's variables. The chart's own win over values of `settings`, whose schema has none of them. */}}
{{- define "attend.settings" -}}
{{- include "attend.check" . }}
{{- $own := .Values }}
{{- $ranks := mul $own.tensorParallel $own.replicasPerPod }}
{{- $data := dict }}
{{- range $name, $value := $own.settings }}
{{/* Whole numbers as such: a file's are floats, and large ones would become 3e+09. */}}
{{- if kindIs "float64" $value }}{{ $value = eq $value (floor $value) | ternary (int64 $value) $value }}{{ end }}
{{- $_ := set $data (printf "ATTEND_%s" (upper $name)) (toString $value) }}
{{- end }}
{{- $_ := set $data "ATTEND_DEVICE" ($own.gpu.enabled | ternary "cuda" "cpu") }}
{{/* Threads follow the pod's limits by themselves. Named here, they are the same on every node. */}}
{{- $_ := set $data "ATTEND_NUM_THREADS" (div $own.resources.cpu $ranks | toString) }}
{{- $_ := set $data "ATTEND_KV_CACHE_MEMORY" $own.kvCacheMemory }}
{{- $_ := set $data "ATTEND_LOG_FORMAT" "json" }}
{{- $_ := set $data "ATTEND_EXPOSE_DOCS" "false" }}
{{- if has $own.model.source (list "claim" "oci") }}
{{- $_ := set $data "ATTEND_MODEL" (printf "/weights/%s" $own.model.path | trimSuffix "/") }}
{{- else if eq $own.model.source "hub" }}
{{- $_ := set $data "ATTEND_MODEL" (printf "/weights/%s" (include "attend.folder" .)) }}
{{/* Callers know the repository, not the folder. */}}
{{- if not (hasKey $own.settings "served_model_name") }}
{{- $_ := set $data "ATTEND_SERVED_MODEL_NAME" (regexReplaceAll "^hf://([^/@]+/[^/@]+).*$" $own.model.reference "${1}") }}
{{- end }}
{{- end }}
{{- if gt (int $own.tensorParallel) 1 }}{{ $_ := set $data "ATTEND_TENSOR_PARALLEL" (toString $own.tensorParallel) }}{{ end }}
{{- if $own.keys.existingSecret }}{{ $_ := set $data "ATTEND_API_KEYS_FILE" "/etc/attend/keys" }}{{ end }}
{{- if $own.tls.existingSecret }}
{{- $_ := set $data "ATTEND_TLS_CERT" "/etc/attend-tls/tls.crt" }}
{{- $_ := set $data "ATTEND_TLS_KEY" "/etc/attend-tls/tls.key" }}
{{- end }}
{{- if ne $own.kvDisk.volume "none" }}
{{- $_ := set $data "ATTEND_KV_DISK_FOLDER" "/var/lib/attend/kv" }}
{{- $_ := set $data "ATTEND_KV_DISK_BYTES" (printf "%sB" $own.kvDisk.size) }}
{{- end }}
{{- with $own.tracing.endpoint }}{{ $_ := set $data "ATTEND_OTEL_ENDPOINT" . }}{{ end }}
{{- if eq $own.mode "rayservice" }}
{{/* A replica's own standard error is a file of Ray's. `kubectl logs` shows the container's first process. */}}
{{- $_ := set $data "ATTEND_LOG_FILE" "/proc/1/fd/1" }}
{{- $_ := set $data "RAY_SERVE_HAPROXY_BINARY_PATH" "/opt/attend/edge/haproxy" }}
{{/* deploy/base/rayservice/ray.env, with its reasons; three times follow from those of the values. */}}
{{- range regexFindAll "(?m)^[A-Za-z_]+=.*$" (.Files.Get "files/ray.env") -1 }}
{{- $pair := splitn "=" 2 . }}{{ $_ := set $data $pair._0 $pair._1 }}
{{- end }}
{{- $_ := set $data "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S" (add $own.requestTimeoutSeconds 60 | toString) }}
{{- $_ := set $data "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" (add $own.requestTimeoutSeconds 40 | toString) }}
{{- $_ := set $data "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (include "attend.nodeDrain" .) }}
{{- else }}
{{- $_ := set $data "ATTEND_HOST" "0.0.0.0" }}
{{- $_ := set $data "ATTEND_REQUEST_TIMEOUT_SECONDS" (toString $own.requestTimeoutSeconds) }}
{{- $_ := set $data "ATTEND_LINGER_SECONDS" (include "attend.linger" .) }}
{{- $_ := set $data "ATTEND_DRAIN_SECONDS" (toString $own.drainSeconds) }}
{{- if not (include "attend.ray" .) }}
{{- $_ := set $data "ATTEND_SINGLE" "true" }}
{{- else if gt (int $own.replicasPerPod) 1 }}
{{- $_ := set $data "ATTEND_REPLICAS" (toString $own.replicasPerPod) }}
{{- end }}
{{- end }}
{{- toYaml $data }}
{{- end }}

{{/* A change of the settings gives the ConfigMap another name, and so replaces the pods. */}}
{{- define "attend.settingsName" -}}
attend-settings-{{ include "attend.settings" . | sha256sum | trunc 10 }}
{{- end }}
