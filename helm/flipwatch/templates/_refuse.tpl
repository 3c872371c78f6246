{{- /* Values that are each allowed and make no sense together: one sentence, and nothing is rendered. */ -}}
{{- define "flipwatch.refuse" -}}
{{- $sidecar := eq .Values.form "sidecar" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $differential := get $settings "differential" | default dict -}}
{{- include "flipwatch.refuseSecrets" . -}}
{{- include "flipwatch.refuseEnv" . -}}
{{- include "flipwatch.refuseRepeated" . -}}
{{- if regexMatch "(?i)^(127\\.|localhost$|[0:]*:0*1$|[0:]*:ffff:7f[0-9a-f]{2}:)" (.Values.listenHost | default "") -}}
{{- fail (printf "listenHost (%s) is loopback, where the kubelet cannot reach /livez, so that it would restart the container again and again: set 0.0.0.0, or :: where pods have IPv6 only." .Values.listenHost) -}}
{{- end -}}
{{- if and (not $sidecar) (regexMatch "^[0-9]" (include "flipwatch.fullname" .)) -}}
{{- fail (printf "%s begins with a digit, which the name of a Service cannot: set fullnameOverride." (include "flipwatch.fullname" .)) -}}
{{- end -}}
{{- if and (.Values.readiness).gateOnHealth (not $sidecar) -}}
{{- fail "readiness.gateOnHealth needs form: sidecar: the readiness of a pod of its own says nothing about the pod of vLLM." -}}
{{- end -}}
{{- if and (.Values.persistence).enabled $sidecar -}}
{{- fail "persistence is for form: standalone: replicas of one Deployment would share the claim; set persistence.enabled to false." -}}
{{- end -}}
{{- if and (.Values.automation).rules (.Values.automation).existingConfigMap -}}
{{- fail "automation.rules and automation.existingConfigMap are both set: keep one of the two." -}}
{{- end -}}
{{- if and $differential.peer_url (not (.Values.secretKeys).peerToken) -}}
{{- fail "settings.differential.peer_url needs secretKeys.peerToken, the key of existingSecret with the probe token of that vLLM." -}}
{{- end -}}
{{- if and $sidecar (.Values.serviceMonitor).enabled -}}
{{- fail "serviceMonitor needs form: standalone, a sidecar has no Service of its own: enable podMonitor instead." -}}
{{- end -}}
{{- if and (.Values.serviceMonitor).enabled (.Values.podMonitor).enabled -}}
{{- fail "serviceMonitor and podMonitor are both enabled, and everything would be scraped twice: keep one of the two." -}}
{{- end -}}
{{- if and $sidecar (.Values.podMonitor).enabled (not (.Values.sidecar).podSelector) -}}
{{- fail "sidecar.podSelector is empty: give the labels of the pods with the sidecar, which podMonitor selects them by." -}}
{{- end -}}
{{- if and $sidecar (.Values.networkPolicy).enabled -}}
{{- fail "networkPolicy is for form: standalone: in front of the pods of vLLM it would cut off the model's own callers." -}}
{{- end -}}
{{- range $kind := list "serviceMonitor" "podMonitor" -}}
{{- $monitor := index $.Values $kind -}}
{{- if and $monitor.enabled $monitor.scrapeTimeout -}}
{{- if gt (include "flipwatch.milliseconds" $monitor.scrapeTimeout | int) (include "flipwatch.milliseconds" $monitor.interval | int) -}}
{{- fail (printf "%s.scrapeTimeout (%s) is longer than %s.interval (%s): make it shorter." $kind $monitor.scrapeTimeout $kind $monitor.interval) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Secrets in the values: a ConfigMap or a Deployment would show them, and so would the release's history. */ -}}
{{- define "flipwatch.refuseSecrets" -}}
{{- $settings := .Values.settings | default dict -}}
{{- if (get $settings "alerts" | default dict).webhook_url -}}
{{- fail "settings.alerts.webhook_url would stand in a ConfigMap, and such a URL holds a secret: put it into existingSecret, and its key into secretKeys.webhookUrl." -}}
{{- end -}}
{{- $peer := (get $settings "differential" | default dict).peer_url -}}
{{- range $place, $url := dict "vllm.url" (.Values.vllm).url "settings.differential.peer_url" $peer -}}
{{- if regexMatch "^[^:]*:[/\\\\]*[^/\\\\?#]*@" ($url | default "") -}}
{{- fail (printf "%s has a user or a password in it, which everyone who may read the release would see: take them out (vLLM's key goes into existingSecret, and the name of its key there into secretKeys.vllmApiKey)." $place) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /*
Variables in extraEnv that the chart sets itself, where one of the two would be without effect.  Those that hold a secret
may come from another Secret, unless secretKeys names a key for them.  Flipwatch reads capitals and small letters alike.
*/ -}}
{{- define "flipwatch.refuseEnv" -}}
{{- $ours := dict
  "LISTEN_HOST" "listenHost"
  "LISTEN_PORT" "service.port"
  "DATA_DIR" "persistence"
  "PROBE_TOKEN" "secretKeys.probeToken"
  "PROBE_TOKEN_FILE" "secretKeys.probeToken"
  "TOKENS_FILE" "secretKeys.tokens"
  "VLLM" "vllm.url and settings.vllm"
  "VLLM__URL" "vllm.url"
  "MITIGATION" "mode and settings.mitigation"
  "MITIGATION__MODE" "mode"
  "CONFIG" "settings"
  "ALERTS" "settings.alerts"
  "AUTOMATION" "automation.rules"
  "AUTOMATION__RULES" "automation.rules"
  "AUTOMATION__POLICY_FILE" "automation.existingConfigMap"
  "DIFFERENTIAL" "settings.differential"
  "DIFFERENTIAL__PEER_TOKEN_FILE" "secretKeys.peerToken" -}}
{{- $secret := dict
  "TOKENS" "tokens"
  "VLLM__API_KEY" "vllmApiKey"
  "ALERTS__WEBHOOK_URL" "webhookUrl"
  "DIFFERENTIAL__PEER_TOKEN" "peerToken" -}}
{{- $keys := .Values.secretKeys | default dict -}}
{{- range .Values.extraEnv -}}
{{- $name := upper .name -}}
{{- if hasPrefix "FLIPWATCH_" $name -}}
{{- $name = trimPrefix "FLIPWATCH_" $name -}}
{{- $value := get $ours $name -}}
{{- $key := get $secret $name -}}
{{- if and $key (get $keys $key) -}}{{- $value = printf "secretKeys.%s" $key -}}{{- end -}}
{{- if $value -}}
{{- fail (printf "extraEnv has %s, which the chart sets itself: set %s instead." .name $value) -}}
{{- end -}}
{{- if and $key .value -}}
{{- fail (printf "extraEnv has the value of %s, which is a secret: put it into existingSecret, and its key into secretKeys.%s." .name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Labels and annotations that would stand in an object twice; some are what selectors look for. */ -}}
{{- define "flipwatch.refuseRepeated" -}}
{{- $common := .Values.commonLabels | default dict -}}
{{- $own := include "flipwatch.labels" (dict "Chart" .Chart "Release" .Release "Values" (omit .Values "commonLabels")) | fromYaml -}}
{{- range $place, $labels := dict
  "commonLabels" $common
  "podLabels" .Values.podLabels
  "service.labels" (.Values.service).labels
  "serviceMonitor.additionalLabels" (.Values.serviceMonitor).additionalLabels
  "podMonitor.additionalLabels" (.Values.podMonitor).additionalLabels
  "prometheusRule.additionalLabels" (.Values.prometheusRule).additionalLabels
  "dashboards.labels" (.Values.dashboards).labels -}}
{{- range $label, $_ := $labels -}}
{{- if hasKey $own $label -}}
{{- fail (printf "%s has the label %s, which the chart sets itself: remove it." $place $label) -}}
{{- end -}}
{{- if and (ne $place "commonLabels") (hasKey $common $label) -}}
{{- fail (printf "%s has the label %s, which commonLabels has too: keep one of the two." $place $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $folder := ternary ((.Values.dashboards).folderAnnotation | default "grafana_folder") "" (not (empty (.Values.dashboards).folder)) -}}
{{- range $place, $pair := dict
  "podAnnotations" (list "checksum/config" .Values.podAnnotations)
  "persistence.annotations" (list "helm.sh/resource-policy" (.Values.persistence).annotations)
  "dashboards.annotations" (list $folder (.Values.dashboards).annotations) -}}
{{- if hasKey (index $pair 1 | default dict) (index $pair 0) -}}
{{- fail (printf "%s has the annotation %s, which the chart sets itself: remove it." $place (index $pair 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A duration of Prometheus (1m30s) as a number. */ -}}
{{- define "flipwatch.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 "w" 604800000 "y" 31536000000 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+(ms|[smhdwy])" . -1 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $sum = add $sum (mul (trimSuffix $unit . | int64) (get $units $unit)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
