{{- define "gpubridge.selector" -}}
app.kubernetes.io/name: gpubridge
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpubridge.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) }}
{{- end }}
