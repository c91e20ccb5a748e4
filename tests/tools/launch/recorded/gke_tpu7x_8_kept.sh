#!/bin/bash

##### tpu-embedding launch create
# check that the config fits the slices
tpu-embedding compile configs/my_config.py --topology tpu7x:2x2x1 --slices 1 --set batch_size=65536
# check that the zone offers tpu7x-standard-4t
gcloud compute machine-types describe tpu7x-standard-4t --project=my-project --zone=us-east5-a --format=json
# check that the service account exists
gcloud iam service-accounts describe trainer@my-project.iam.gserviceaccount.com --project=my-project --format=json
# create the bucket
if ! gcloud storage buckets describe gs://my-bucket --project=my-project --raw --format=json >/dev/null; then
gcloud storage buckets create gs://my-bucket --project=my-project --location=us-east5 --uniform-bucket-level-access --enable-hierarchical-namespace
fi
# admit the machines to the bucket
gcloud storage buckets add-iam-policy-binding gs://my-bucket --project=my-project --member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/storage.objectUser
# create the cluster
if ! gcloud container clusters describe dlrm --project=my-project --location=us-east5-a --format=json >/dev/null; then
gcloud container clusters create dlrm --project=my-project --location=us-east5-a --network=default --release-channel=regular --machine-type=e2-standard-4 --num-nodes=1 --workload-pool=my-project.svc.id.goog --addons=GcsFuseCsiDriver
fi
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# install the JobSet controller
if ! kubectl get customresourcedefinition jobsets.jobset.x-k8s.io --context=gke_my-project_us-east5-a_dlrm --output=json >/dev/null; then
kubectl apply --server-side --filename=https://github.com/kubernetes-sigs/jobset/releases/download/v0.8.1/manifests.yaml --context=gke_my-project_us-east5-a_dlrm
fi
# create the account of the pods
kubectl apply --filename=- --context=gke_my-project_us-east5-a_dlrm <<'END_OF_INPUT'
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
if ! gcloud container node-pools describe dlrm-0 --project=my-project --location=us-east5-a --cluster=dlrm --format=json >/dev/null; then
gcloud container node-pools create dlrm-0 --project=my-project --location=us-east5-a --cluster=dlrm --machine-type=tpu7x-standard-4t --num-nodes=1 --service-account=trainer@my-project.iam.gserviceaccount.com --scopes=cloud-platform --workload-metadata=GKE_METADATA
fi

##### tpu-embedding launch setup
# copy a file to the bucket
gcloud storage cp configs/my_config.py gs://my-bucket/dlrm/launch/ --project=my-project

##### tpu-embedding launch run --program doctor
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# start doctor on all hosts
if ! kubectl get jobset dlrm-doctor --context=gke_my-project_us-east5-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-east5-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm-doctor
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: 2c509cb6
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
        parallelism: 1
        completions: 1
        completionMode: Indexed
        backoffLimit: 0
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu7x
              cloud.google.com/gke-tpu-topology: 2x2x1
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
              - tpu-embedding[tpu,train]==0.1.0
              - /mnt/bucket/dlrm/results
              - doctor
              - --expect
              - tpu7x:2x2x1
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
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# start train on all hosts
if ! kubectl get jobset dlrm --context=gke_my-project_us-east5-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-east5-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: ed4413c9
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
        parallelism: 1
        completions: 1
        completionMode: Indexed
        backoffLimit: 0
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu7x
              cloud.google.com/gke-tpu-topology: 2x2x1
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
              - tpu-embedding[tpu,train]==0.1.0
              - /mnt/bucket/dlrm/results
              - train
              - /mnt/bucket/dlrm/launch/my_config.py
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
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# follow the log of the first host
kubectl logs --context=gke_my-project_us-east5-a_dlrm --selector=jobset.sigs.k8s.io/jobset-name=dlrm,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0 --container=tpu-embedding --tail=-1 --follow

##### tpu-embedding launch status
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# show the node pools
gcloud container node-pools list --project=my-project --location=us-east5-a --cluster=dlrm
# show the jobs
kubectl get jobsets --context=gke_my-project_us-east5-a_dlrm --output=wide
# show the pods
kubectl get pods --context=gke_my-project_us-east5-a_dlrm --output=wide

##### tpu-embedding launch stop
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# stop train on all hosts
kubectl delete jobset dlrm --context=gke_my-project_us-east5-a_dlrm --ignore-not-found

##### tpu-embedding launch run --resume
# let kubectl reach the cluster
gcloud container clusters get-credentials dlrm --project=my-project --location=us-east5-a
# start train on all hosts
if ! kubectl get jobset dlrm --context=gke_my-project_us-east5-a_dlrm --output=json >/dev/null; then
kubectl apply --filename=- --context=gke_my-project_us-east5-a_dlrm <<'END_OF_INPUT'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: dlrm
  labels:
    app: tpu-embedding
  annotations:
    tpu-embedding-checksum: fbe4b62c
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
        parallelism: 1
        completions: 1
        completionMode: Indexed
        backoffLimit: 0
        template:
          metadata:
            annotations:
              gke-gcsfuse/volumes: 'true'
          spec:
            serviceAccountName: tpu-embedding
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu7x
              cloud.google.com/gke-tpu-topology: 2x2x1
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
              - tpu-embedding[tpu,train]==0.1.0
              - /mnt/bucket/dlrm/results
              - train
              - /mnt/bucket/dlrm/launch/my_config.py
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
if gcloud container node-pools describe dlrm-0 --project=my-project --location=us-east5-a --cluster=dlrm --format=json >/dev/null; then
gcloud container node-pools delete dlrm-0 --project=my-project --location=us-east5-a --cluster=dlrm --quiet
fi

##### tpu-embedding launch delete --with-cluster
# delete the cluster
if gcloud container clusters describe dlrm --project=my-project --location=us-east5-a --format=json >/dev/null; then
gcloud container clusters delete dlrm --project=my-project --location=us-east5-a --quiet
fi
