{{- define "hedgerow.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "hedgerow.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "hedgerow.securityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "hedgerow.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
{{- end }}

{{- /* Every server of a pool by its own name: Hedgerow itself keeps a search where its KV is. */ -}}
{{- define "hedgerow.urls" -}}
{{- $root := index . 0 }}{{ $pool := index . 1 }}{{ $urls := list }}
{{- range until (int (index $root.Values.sglang.pools $pool).replicas) }}
{{- $urls = append $urls (printf "http://%s-%s-%d.%s-%s:30000" $root.Release.Name $pool . $root.Release.Name $pool) }}
{{- end }}
{{- join "," $urls | quote }}
{{- end }}
