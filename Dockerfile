# Images with prsmed and its torch wheel: `cpu` (about 1.5 GB) and, by default, `cuda` with the CUDA 13 libraries (about
# 5 GB).
#
#   scripts/wheel                      # or copy a downloaded prsmed-*.whl to target/wheels
#   docker build --tag prsmed .        # or: docker build --tag prsmed --target cpu .
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" --volume "$PWD:/work" --volume prsmed-cache:/cache \
#     prsmed train --data-root DATA --out RUN
#
# Paths in the command are relative to the current folder, which is /work in the container. The volume `prsmed-cache`
# keeps downloaded models. `--gpus all` needs NVIDIA's container toolkit; leave it out to run on the CPU.
#
# Why plain Debian and not nvidia/cuda:13.0.*-runtime: torch's wheel depends on the CUDA 13.0 libraries as Python
# packages and loads only those, so that image would store them twice. The variables that it sets are set here too.
FROM debian:bookworm-slim AS base

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/prsmed \
    && mkdir --mode=1777 /cache /work
ENV HF_HOME=/cache/huggingface \
    PRSMED_CACHE=/cache/prsmed
WORKDIR /work
ENTRYPOINT ["/opt/prsmed/bin/prsmed"]

FROM base AS cpu

# torch without CUDA's libraries, and the two of them that its CPU part is linked with
RUN --mount=type=bind,source=target/wheels,target=/wheels \
    /opt/prsmed/bin/pip install --no-cache-dir --no-deps \
      'torch==2.11.*' 'nvidia-cuda-cupti==13.0.*' 'nvidia-cuda-runtime==13.0.*' /wheels/prsmed-*.whl

FROM base AS cuda

RUN --mount=type=bind,source=target/wheels,target=/wheels \
    /opt/prsmed/bin/pip install --no-cache-dir /wheels/prsmed-*.whl

# What the container toolkit passes in, and the driver that it requires: CUDA 13.0, that is version 580 or newer.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=13.0"
