# docker build -t megatron-zpp .                        on CPUs
# docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg TORCH_INDEX= -t megatron-zpp .
ARG BASE=ubuntu:24.04
FROM $BASE

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git iproute2 make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash trainer
USER trainer
WORKDIR /home/trainer/megatron_zpp
COPY --chown=trainer . .

# Where torch comes from: PyPI's is the CUDA build, TORCH_INDEX= takes it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN make .venv/.ready TORCH_INDEX=$TORCH_INDEX
ENV PATH=/home/trainer/megatron_zpp/.venv/bin:$PATH
CMD ["examples/quickstart/run.sh"]
