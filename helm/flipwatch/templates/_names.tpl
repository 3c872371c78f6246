{{- /* Names, labels, and the image. */ -}}

{{- define "flipwatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "flipwatch.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "flipwatch.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "flipwatch.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What never changes over upgrades: the selector of a Deployment is immutable. */ -}}
{{- define "flipwatch.selectorLabels" -}}
app.kubernetes.io/name: {{ include "flipwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "flipwatch.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "flipwatch.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: monitor
app.kubernetes.io/part-of: flipwatch
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "flipwatch.serviceAccountName" -}}
{{- if (eq (toString (dig "create" true (.Values.serviceAccount | default dict))) "true") -}}
{{- default (include "flipwatch.fullname" .) (.Values.serviceAccount).name -}}
{{- else -}}
{{- default "default" (.Values.serviceAccount).name -}}
{{- end -}}
{{- end -}}

{{- define "flipwatch.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is empty: build the image with the Dockerfile of Flipwatch's repository, push it to a registry of yours, and name it here." $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Whether the release has a ConfigMap: settings or rules of the values. */ -}}
{{- define "flipwatch.hasConfig" -}}
{{- if or .Values.settings (.Values.automation).rules -}}true{{- end -}}
{{- end -}}

{{- /* Where vLLM answers. */ -}}
{{- define "flipwatch.vllmUrl" -}}
{{- if (.Values.vllm).url -}}
{{- (.Values.vllm).url -}}
{{- else if eq .Values.form "sidecar" -}}
http://127.0.0.1:8000
{{- else -}}
{{- fail "vllm.url is empty: name the Service of the vLLM server that is to be watched, with its port." -}}
{{- end -}}
{{- end -}}
