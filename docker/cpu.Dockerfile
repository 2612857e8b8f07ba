# Plans, and trains on CPUs over gloo: docker build -f docker/cpu.Dockerfile -t optimus-cpu .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/optimus
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY optimus optimus
ENV PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/opt/optimus/constraints.txt
# torch comes from the index that is configured for pip: give one with CPU builds (build argument) to save gigabytes.
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 && pip install '.[train]'
RUN useradd --create-home optimus
USER optimus
WORKDIR /home/optimus
ENTRYPOINT ["optimus"]
