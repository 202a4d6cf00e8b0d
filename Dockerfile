# dschat in a container.
#   docker build -t dschat .                              torch for CUDA
#   docker build -t dschat --build-arg DEVICE=cpu .       torch for CPUs, much smaller
#   docker run --gpus all --ipc host -v "$PWD/output:/workspace/output" dschat train --recipe demo
# torch's CUDA build brings its own CUDA libraries; of the host only the driver is needed.
FROM python:3.11-slim-bookworm

# A C compiler: Triton and the CPU kernels compile at first use. git: models and data of the hub.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
ARG DEVICE=cuda
COPY requirements.lock ./
# The CPU build's local version (+cpu) sorts above the build for CUDA.
RUN if [ "$DEVICE" = cpu ]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --requirement requirements.lock
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

RUN useradd --create-home --uid 1000 dschat && install --directory --owner dschat /workspace
USER 1000
WORKDIR /workspace
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["dschat"]
CMD ["--help"]
