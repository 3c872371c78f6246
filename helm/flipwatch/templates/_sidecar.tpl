{{- /*
For charts that have this one as a dependency, with `form: sidecar`; the context is that of this chart:

  initContainers:
    {{- include "flipwatch.sidecar" .Subcharts.flipwatch | nindent 8 }}
  volumes:
    {{- include "flipwatch.sidecarVolumes" .Subcharts.flipwatch | nindent 8 }}
  containers:
    - name: vllm
      env:
        {{- include "flipwatch.vllmEnv" .Subcharts.flipwatch | nindent 12 }}
      volumeMounts:
        {{- include "flipwatch.vllmVolumeMounts" .Subcharts.flipwatch | nindent 12 }}

The sidecar starts before vLLM and ends after it.  It has no startup probe and no lifecycle hook, so that the kubelet
starts vLLM as soon as it runs, and no readiness probe unless `readiness.gateOnHealth` asks for one.
*/ -}}
{{- define "flipwatch.sidecar" -}}
{{- include "flipwatch.refuse" . -}}
- name: flipwatch
  restartPolicy: Always
  {{- include "flipwatch.containerBody" . | nindent 2 }}
{{- end -}}

{{- /* The last of them is vLLM's: one file of the Secret, since the API's tokens are none of vLLM's business. */ -}}
{{- define "flipwatch.sidecarVolumes" -}}
{{ include "flipwatch.volumes" . }}
- name: flipwatch-probe-token
  secret:
    secretName: {{ include "flipwatch.secretName" . | quote }}
    defaultMode: 292
    optional: true
    items:
      - key: {{ (.Values.secretKeys).probeToken | default "probe-token" | quote }}
        path: {{ (.Values.secretKeys).probeToken | default "probe-token" | quote }}
{{- end -}}

{{- define "flipwatch.vllmEnv" -}}
- name: VLLM_PLUGINS
  value: {{ (.Values.sidecar).vllmPlugins | default "flipwatch" | quote }}
- name: FLIPWATCH_PROBE_TOKEN_FILE
  value: /etc/flipwatch/secret/{{ (.Values.secretKeys).probeToken | default "probe-token" }}
{{- end -}}

{{- define "flipwatch.vllmVolumeMounts" -}}
- name: flipwatch-probe-token
  mountPath: /etc/flipwatch/secret
  readOnly: true
{{- end -}}
