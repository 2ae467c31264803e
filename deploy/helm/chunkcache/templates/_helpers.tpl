{{- define "chunkcache.labels" -}}
app.kubernetes.io/name: chunkcache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "chunkcache.fullname" -}}
{{ .Release.Name }}-chunkcache
{{- end }}
