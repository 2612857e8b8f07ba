# Trains on GPUs over NCCL: docker build -f docker/gpu.Dockerfile -t optimus-gpu .
# docker run --gpus all --ipc host --ulimit memlock=-1 optimus-gpu python -m benchmarks gpu --json
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/optimus
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY optimus optimus
COPY benchmarks benchmarks
ENV PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/opt/optimus/constraints.txt
# The registry's torch brings its own CUDA and NCCL; the host gives only the driver.
RUN pip install torch==2.13.0 && pip install '.[train]'
ENV PYTHONUNBUFFERED=1
CMD ["optimus", "--help"]
