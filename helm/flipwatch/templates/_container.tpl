{{- /* What both forms of the container share: environment, mounts, volumes, probes. */ -}}

{{- define "flipwatch.env" -}}
{{- $sidecar := eq .Values.form "sidecar" -}}
- name: FLIPWATCH_LISTEN_HOST
  value: {{ .Values.listenHost | default "0.0.0.0" | quote }}
- name: FLIPWATCH_LISTEN_PORT
  value: "9477"
- name: FLIPWATCH_DATA_DIR
  value: /var/lib/flipwatch
- name: FLIPWATCH_PROBE_TOKEN_FILE
  value: /etc/flipwatch/secret/{{ (.Values.secretKeys).probeToken | default "probe-token" }}
{{- with dig "tokens" "tokens.yaml" (.Values.secretKeys | default dict) }}
- name: FLIPWATCH_TOKENS_FILE
  value: /etc/flipwatch/secret/{{ . }}
{{- end }}
- name: FLIPWATCH_VLLM__URL
  value: {{ include "flipwatch.vllmUrl" . | quote }}
- name: FLIPWATCH_MITIGATION__MODE
  value: {{ .Values.mode | default "observe" | quote }}
{{- with (.Values.secretKeys).peerToken }}
- name: FLIPWATCH_DIFFERENTIAL__PEER_TOKEN_FILE
  value: /etc/flipwatch/secret/{{ . }}
{{- end }}
{{- with (.Values.secretKeys).vllmApiKey }}
- name: FLIPWATCH_VLLM__API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "flipwatch.secretName" $ | quote }}
      key: {{ . | quote }}
      {{- if $sidecar }}
      optional: true
      {{- end }}
{{- end }}
{{- with (.Values.secretKeys).webhookUrl }}
- name: FLIPWATCH_ALERTS__WEBHOOK_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "flipwatch.secretName" $ | quote }}
      key: {{ . | quote }}
      {{- if $sidecar }}
      optional: true
      {{- end }}
{{- end }}
{{- if .Values.settings }}
- name: FLIPWATCH_CONFIG
  value: /etc/flipwatch/config/flipwatch.yaml
{{- end }}
{{- if (.Values.automation).rules }}
- name: FLIPWATCH_AUTOMATION__POLICY_FILE
  value: /etc/flipwatch/config/policy.yaml
{{- else if (.Values.automation).existingConfigMap }}
- name: FLIPWATCH_AUTOMATION__POLICY_FILE
  value: /etc/flipwatch/policy/{{ (.Values.automation).existingConfigMapKey | default "policy.yaml" }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "flipwatch.secretName" -}}
{{- required "existingSecret is empty: create a Secret with the keys that secretKeys names (probe-token, which the vLLM process has too, and tokens.yaml), and give its name." .Values.existingSecret -}}
{{- end -}}

{{- define "flipwatch.volumeMounts" -}}
- name: flipwatch-secret
  mountPath: /etc/flipwatch/secret
  readOnly: true
{{- if include "flipwatch.hasConfig" . }}
- name: flipwatch-config
  mountPath: /etc/flipwatch/config
  readOnly: true
{{- end }}
{{- if (.Values.automation).existingConfigMap }}
- name: flipwatch-policy
  mountPath: /etc/flipwatch/policy
  readOnly: true
{{- end }}
- name: flipwatch-data
  mountPath: /var/lib/flipwatch
- name: flipwatch-tmp
  mountPath: /tmp
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /*
In a pod of vLLM nothing of ours may hold up the model: what is missing is optional there, and the sidecar says what it
lacks.  The folders have no size limit there: where one is reached, the kubelet evicts the whole pod (the store bounds
itself).  The pod's fsGroup is the other chart's, so that the files are readable for our user only when they are for all.
*/ -}}
{{- define "flipwatch.volumes" -}}
{{- $sidecar := eq .Values.form "sidecar" -}}
- name: flipwatch-secret
  secret:
    secretName: {{ include "flipwatch.secretName" . | quote }}
    defaultMode: {{ ternary 292 288 $sidecar }}
    {{- if $sidecar }}
    optional: true
    {{- end }}
{{- if include "flipwatch.hasConfig" . }}
- name: flipwatch-config
  configMap:
    name: {{ include "flipwatch.fullname" . | quote }}
    {{- if $sidecar }}
    optional: true
    {{- end }}
{{- end }}
{{- with (.Values.automation).existingConfigMap }}
- name: flipwatch-policy
  configMap:
    name: {{ . | quote }}
    {{- if $sidecar }}
    optional: true
    {{- end }}
{{- end }}
- name: flipwatch-data
{{- if and (.Values.persistence).enabled (not $sidecar) }}
  persistentVolumeClaim:
    claimName: {{ default (include "flipwatch.fullname" .) (.Values.persistence).existingClaim | quote }}
{{- else if $sidecar }}
  emptyDir: {}
{{- else }}
  emptyDir:
    sizeLimit: {{ (.Values.persistence).size | default "1Gi" | quote }}
{{- end }}
- name: flipwatch-tmp
  emptyDir: {}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* /livez says that the process answers; it never depends on the model.  Slow to judge: a restart costs more than a wait. */ -}}
{{- define "flipwatch.probes" -}}
livenessProbe:
  httpGet:
    path: /livez
    port: http-flipwatch
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- if (.Values.readiness).gateOnHealth }}
readinessProbe:
  httpGet:
    path: /readyz
    port: http-flipwatch
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}
{{- end -}}

{{- define "flipwatch.containerBody" -}}
image: {{ include "flipwatch.image" . | quote }}
imagePullPolicy: {{ (.Values.image).pullPolicy | default "IfNotPresent" }}
command: [flipwatch]
{{- /* Beside the model it never ends by itself: a pod is not ready while one of its sidecars is down. */}}
args: {{ ternary "[serve, --stay]" "[serve]" (eq .Values.form "sidecar") }}
ports:
  - name: http-flipwatch
    containerPort: 9477
    protocol: TCP
env:
  {{- include "flipwatch.env" . | nindent 2 }}
{{ include "flipwatch.probes" . }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  {{- include "flipwatch.volumeMounts" . | nindent 2 }}
{{- end -}}
