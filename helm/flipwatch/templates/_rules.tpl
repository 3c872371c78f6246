{{- /* The groups of files/rules.yaml with the knobs of prometheusRule.rules turned, and the extra groups behind them. */ -}}
{{- define "flipwatch.ruleGroups" -}}
{{- $knobs := (.Values.prometheusRule).rules | default dict -}}
{{- $source := .Files.Get "files/rules.yaml" -}}
{{- if not $source -}}
{{- fail "This copy of the chart has no files/rules.yaml: take the whole chart, or set prometheusRule.enabled to false." -}}
{{- end -}}
{{- $names := list -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $source).groups -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- if not $rule.alert -}}
{{- $rules = append $rules $rule -}}
{{- else -}}
{{- $names = append $names $rule.alert -}}
{{- $knob := get $knobs $rule.alert | default dict -}}
{{- $on := dig "enabled" true $knob -}}
{{- if and (not $on) (gt (len $knob) 1) -}}
{{- fail (printf "prometheusRule.rules.%s is off (enabled: false) and tuned: remove enabled, or all the rest." $rule.alert) -}}
{{- end -}}
{{- if $on -}}
{{- if hasKey $knob "for" -}}{{- $_ := set $rule "for" (get $knob "for") -}}{{- end -}}
{{- if hasKey $knob "keepFiringFor" -}}{{- $_ := set $rule "keep_firing_for" (get $knob "keepFiringFor") -}}{{- end -}}
{{- $labels := merge (dict) (get $knob "labels" | default dict) (($.Values.prometheusRule).ruleLabels | default dict) ($rule.labels | default dict) -}}
{{- if hasKey $knob "severity" -}}
{{- if hasKey (get $knob "labels" | default dict) "severity" -}}
{{- fail (printf "prometheusRule.rules.%s has severity and labels.severity: keep one of the two." $rule.alert) -}}
{{- end -}}
{{- $_ := set $labels "severity" (get $knob "severity") -}}
{{- end -}}
{{- $_ := set $rule "labels" $labels -}}
{{- $annotations := merge (dict) (get $knob "annotations" | default dict) ($rule.annotations | default dict) -}}
{{- $base := ($.Values.prometheusRule).runbookUrlBase -}}
{{- if and $base $annotations.runbook_url (not (contains "://" $annotations.runbook_url)) -}}
{{- $_ := set $annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" $base) (trimPrefix "/" $annotations.runbook_url)) -}}
{{- end -}}
{{- $_ := set $rule "annotations" $annotations -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $rules -}}
{{- $groups = append $groups (merge (dict "rules" $rules) (omit $group "rules")) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $knobs -}}
{{- if not (has $name $names) -}}
{{- fail (printf "prometheusRule.rules.%s is no alert of this chart: it has %s." $name (join ", " (sortAlpha $names))) -}}
{{- end -}}
{{- end -}}
{{- range $extra := (.Values.prometheusRule).extraGroups -}}
{{- range $group := $groups -}}
{{- if eq $group.name $extra.name -}}
{{- fail (printf "prometheusRule.extraGroups has a group named %s, as one of this chart's is: give it another name." $extra.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- concat $groups ((.Values.prometheusRule).extraGroups | default list) | toYaml -}}
{{- end -}}
