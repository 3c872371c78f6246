{{- /* Values that are each allowed and make no sense together: one sentence, and nothing is rendered. */ -}}
{{- define "flipwatch.refuse" -}}
{{- $sidecar := eq .Values.form "sidecar" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $differential := get $settings "differential" | default dict -}}
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
