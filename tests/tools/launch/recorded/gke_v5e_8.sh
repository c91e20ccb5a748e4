#!/bin/bash

##### tpu-embedding launch create
# check that the config fits the slices
tpu-embedding compile dlrm --topology v5e:2x4 --slices 1 --set batch_size=65536
# check that the zone offers ct5lp-hightpu-4t
gcloud compute machine-types describe ct5lp-hightpu-4t --project=my-project --zone=us-west4-a --format=json
# check that the service account exists
gcloud iam service-accounts describe trainer@my-project.iam.gserviceaccount.com --project=my-project --format=json
# create the bucket
if ! gcloud storage buckets describe gs://my-bucket --project=my-project --raw --format=json >/dev/null; then
gcloud storage buckets create gs://my-bucket --project=my-project --location=us-west4 --uniform-bucket-level-access --enable-hierarchical-namespace
fi
# admit the machines to the bucket
gcloud storage buckets add-iam-policy-binding gs://my-bucket --project=my-project --member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/storage.objectUser
# create the cluster
if ! gcloud container clusters describe dlrm --project=my-project --location=us-west4-a --format=json >/dev/null; then
gcloud container clusters create dlrm --project=my-project --location=us-west4-a --network=default --release-channel=regular --machine-type=e2-standard-4 --num-nodes=1 --workload-pool=my-project.svc.id.goog --addons=GcsFuseCsiDriver
fi
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# install the JobSet controller
if ! kubectl get customresourcedefinition jobsets.jobset.x-k8s.io --context=gke_my-project_us-west4-a_dlrm --output=json >/dev/null; then
kubectl apply --server-side --filename=https://github.com/kubernetes-sigs/jobset/releases/download/v0.8.1/manifests.yaml --context=gke_my-project_us-west4-a_dlrm
fi
# create the account of the pods
kubectl apply --filename=- --context=gke_my-project_us-west4-a_dlrm <<'END_OF_INPUT'
apiVersion: v1
kind: ServiceAccount
metadata:
  name: tpu-embedding
  annotations:
    iam.gke.io/gcp-service-account: trainer@my-project.iam.gserviceaccount.com
END_OF_INPUT
# let the pods act as the service account
gcloud iam service-accounts add-iam-policy-binding trainer@my-project.iam.gserviceaccount.com --project=my-project '--member=serviceAccount:my-project.svc.id.goog[default/tpu-embedding]' --role=roles/iam.workloadIdentityUser
# create the node pool of a slice
if ! gcloud container node-pools describe dlrm-0 --project=my-project --location=us-west4-a --cluster=dlrm --format=json >/dev/null; then
gcloud container node-pools create dlrm-0 --project=my-project --location=us-west4-a --cluster=dlrm --machine-type=ct5lp-hightpu-4t --num-nodes=2 --service-account=trainer@my-project.iam.gserviceaccount.com --scopes=cloud-platform --workload-metadata=GKE_METADATA --tpu-topology=2x4 --enable-autoscaling --min-nodes=0 --max-nodes=2 --spot
fi

##### tpu-embedding launch setup
# copy a file to the bucket
gcloud storage cp dist/tpu_embedding-0.1.0-py3-none-any.whl gs://my-bucket/dlrm/launch/ --project=my-project

##### tpu-embedding launch run --program doctor
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# start doctor on all hosts
if ! kubectl get jobset dlrm-doctor --context=gke_my-project_us-west4-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-west4-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm-doctor
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: bef8ddcc
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: dlrm-doctor
  ttlSecondsAfterFinished: 86400
  failurePolicy:
    maxRestarts: 0
    rules:
    - name: lifetimeIsOver
      action: FailJobSet
      onJobFailureReasons:
      - DeadlineExceeded
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: 2
        completions: 2
        completionMode: Indexed
        backoffLimit: 0
        activeDeadlineSeconds: 21600
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 2x4
            tolerations:
            - key: google.com/tpu
              operator: Exists
              effect: NoSchedule
            - key: cloud.google.com/gke-spot
              operator: Exists
              effect: NoSchedule
            containers:
            - name: tpu-embedding
              image: python:3.12
              command:
              - bash
              - -c
              - |
                #!/bin/bash
                # Installs the package in a pod and runs tpu-embedding; a restarted pod resumes.
                # Usage: pod.sh REQUIREMENT OUTPUT_DIR ARGUMENTS...
                set -euo pipefail
                requirement="$1"
                output_dir="$2"
                shift 2
                python -m pip install --quiet --root-user-action=ignore "$requirement"
                if [[ "$1" == train && "${RESTART_ATTEMPT:-0}" != 0 &&
                    -e "$output_dir/metrics.jsonl" ]]; then
                    set -- "$@" --resume
                fi
                exec tpu-embedding "$@"
              - pod.sh
              args:
              - /mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]
              - /mnt/bucket/dlrm/results
              - doctor
              - --expect
              - v5e:2x4
              env:
              - name: RESTART_ATTEMPT
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
              - name: TPU_EMBEDDING_VERDICTS
                value: /mnt/bucket/dlrm/verdicts
              - name: PYTHONUNBUFFERED
                value: '1'
              ports:
              - containerPort: 8471
              - containerPort: 8080
              - containerPort: 8476
              resources:
                requests:
                  google.com/tpu: '4'
                limits:
                  google.com/tpu: '4'
              volumeMounts:
              - name: bucket
                mountPath: /mnt/bucket
            volumes:
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: my-bucket
                  mountOptions: implicit-dirs
END_OF_INPUT
fi

##### tpu-embedding launch run
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# start train on all hosts
if ! kubectl get jobset dlrm --context=gke_my-project_us-west4-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-west4-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: 97bca6ce
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: dlrm
  ttlSecondsAfterFinished: 86400
  failurePolicy:
    maxRestarts: 3
    rules:
    - name: lifetimeIsOver
      action: FailJobSet
      onJobFailureReasons:
      - DeadlineExceeded
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: 2
        completions: 2
        completionMode: Indexed
        backoffLimit: 0
        activeDeadlineSeconds: 21600
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 2x4
            tolerations:
            - key: google.com/tpu
              operator: Exists
              effect: NoSchedule
            - key: cloud.google.com/gke-spot
              operator: Exists
              effect: NoSchedule
            containers:
            - name: tpu-embedding
              image: python:3.12
              command:
              - bash
              - -c
              - |
                #!/bin/bash
                # Installs the package in a pod and runs tpu-embedding; a restarted pod resumes.
                # Usage: pod.sh REQUIREMENT OUTPUT_DIR ARGUMENTS...
                set -euo pipefail
                requirement="$1"
                output_dir="$2"
                shift 2
                python -m pip install --quiet --root-user-action=ignore "$requirement"
                if [[ "$1" == train && "${RESTART_ATTEMPT:-0}" != 0 &&
                    -e "$output_dir/metrics.jsonl" ]]; then
                    set -- "$@" --resume
                fi
                exec tpu-embedding "$@"
              - pod.sh
              args:
              - /mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]
              - /mnt/bucket/dlrm/results
              - train
              - dlrm
              - --output-dir
              - /mnt/bucket/dlrm/results
              - --data-dir
              - /mnt/bucket/criteo
              - --set
              - batch_size=65536
              env:
              - name: RESTART_ATTEMPT
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
              - name: TPU_EMBEDDING_VERDICTS
                value: /mnt/bucket/dlrm/verdicts
              - name: PYTHONUNBUFFERED
                value: '1'
              ports:
              - containerPort: 8471
              - containerPort: 8080
              - containerPort: 8476
              resources:
                requests:
                  google.com/tpu: '4'
                limits:
                  google.com/tpu: '4'
              volumeMounts:
              - name: bucket
                mountPath: /mnt/bucket
            volumes:
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: my-bucket
                  mountOptions: implicit-dirs
END_OF_INPUT
fi

##### tpu-embedding launch logs
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# follow the log of the first host
kubectl logs --context=gke_my-project_us-west4-a_dlrm --selector=jobset.sigs.k8s.io/jobset-name=dlrm,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0 --container=tpu-embedding --tail=-1 --follow

##### tpu-embedding launch status
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# show the node pools
gcloud container node-pools list --project=my-project --location=us-west4-a --cluster=dlrm
# show the jobs
kubectl get jobsets --context=gke_my-project_us-west4-a_dlrm --output=wide
# show the pods
kubectl get pods --context=gke_my-project_us-west4-a_dlrm --output=wide

##### tpu-embedding launch stop
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# stop train on all hosts
kubectl delete jobset dlrm --context=gke_my-project_us-west4-a_dlrm --ignore-not-found

##### tpu-embedding launch run --resume
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-west4-a
# start train on all hosts
if ! kubectl get jobset dlrm --context=gke_my-project_us-west4-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-west4-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: 0f0a5519
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: dlrm
  ttlSecondsAfterFinished: 86400
  failurePolicy:
    maxRestarts: 3
    rules:
    - name: lifetimeIsOver
      action: FailJobSet
      onJobFailureReasons:
      - DeadlineExceeded
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: 2
        completions: 2
        completionMode: Indexed
        backoffLimit: 0
        activeDeadlineSeconds: 21600
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 2x4
            tolerations:
            - key: google.com/tpu
              operator: Exists
              effect: NoSchedule
            - key: cloud.google.com/gke-spot
              operator: Exists
              effect: NoSchedule
            containers:
            - name: tpu-embedding
              image: python:3.12
              command:
              - bash
              - -c
              - |
                #!/bin/bash
                # Installs the package in a pod and runs tpu-embedding; a restarted pod resumes.
                # Usage: pod.sh REQUIREMENT OUTPUT_DIR ARGUMENTS...
                set -euo pipefail
                requirement="$1"
                output_dir="$2"
                shift 2
                python -m pip install --quiet --root-user-action=ignore "$requirement"
                if [[ "$1" == train && "${RESTART_ATTEMPT:-0}" != 0 &&
                    -e "$output_dir/metrics.jsonl" ]]; then
                    set -- "$@" --resume
                fi
                exec tpu-embedding "$@"
              - pod.sh
              args:
              - /mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]
              - /mnt/bucket/dlrm/results
              - train
              - dlrm
              - --output-dir
              - /mnt/bucket/dlrm/results
              - --data-dir
              - /mnt/bucket/criteo
              - --set
              - batch_size=65536
              - --resume
              env:
              - name: RESTART_ATTEMPT
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
              - name: TPU_EMBEDDING_VERDICTS
                value: /mnt/bucket/dlrm/verdicts
              - name: PYTHONUNBUFFERED
                value: '1'
              ports:
              - containerPort: 8471
              - containerPort: 8080
              - containerPort: 8476
              resources:
                requests:
                  google.com/tpu: '4'
                limits:
                  google.com/tpu: '4'
              volumeMounts:
              - name: bucket
                mountPath: /mnt/bucket
            volumes:
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: my-bucket
                  mountOptions: implicit-dirs
END_OF_INPUT
fi

##### tpu-embedding launch fetch
# copy the results
gcloud storage rsync gs://my-bucket/dlrm/results runs/dlrm --project=my-project --recursive

##### tpu-embedding launch delete
# delete the node pool of a slice
if gcloud container node-pools describe dlrm-0 --project=my-project --location=us-west4-a --cluster=dlrm --format=json >/dev/null; then
gcloud container node-pools delete dlrm-0 --project=my-project --location=us-west4-a --cluster=dlrm --quiet
fi

##### tpu-embedding launch delete --with-cluster
# delete the cluster
if gcloud container clusters describe dlrm --project=my-project --location=us-west4-a --format=json >/dev/null; then
gcloud container clusters delete dlrm --project=my-project --location=us-west4-a --quiet
fi
