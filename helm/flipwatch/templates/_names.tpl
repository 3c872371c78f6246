{{- /* Names, labels, and the image. */ -}}

{{- /* A text of 63 characters at most that ends as a label and a name have to. */ -}}
{{- define "flipwatch.cut" -}}
{{- regexReplaceAll "[-._]+$" (trunc 63 .) "" -}}
{{- end -}}

{{- define "flipwatch.name" -}}
{{- include "flipwatch.cut" (default .Chart.Name .Values.nameOverride) -}}
{{- end -}}

{{- /* The Service has it, and can have no dot in it. */ -}}
{{- define "flipwatch.fullname" -}}
{{- $name := include "flipwatch.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $name = .Release.Name -}}
{{- else -}}
{{- $name = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- include "flipwatch.cut" (replace "." "-" $name) -}}
{{- end -}}

{{- /* The name in a namespace that may not be the release's, where another release of this name may have objects too. */ -}}
{{- define "flipwatch.nameIn" -}}
{{- $namespace := default .root.Release.Namespace .namespace -}}
{{- if ne $namespace .root.Release.Namespace -}}{{- .root.Release.Namespace -}}.{{- end -}}
{{- include "flipwatch.fullname" .root -}}
{{- end -}}

{{- /* What never changes over upgrades: the selector of a Deployment is immutable. */ -}}
{{- define "flipwatch.selectorLabels" -}}
app.kubernetes.io/name: {{ include "flipwatch.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "flipwatch.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | include "flipwatch.cut" | quote }}
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
