# docker build --target cpu -t hedgerow:cpu .     the server, the embedded engine, the bundled models
# docker build --target gpu -t hedgerow:gpu .     an SGLang server with Hedgerow's plug-in
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23-runtime

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/hedgerow
COPY constraints.txt ./
RUN /opt/hedgerow/bin/pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY cli/ cli/
COPY server/ server/
COPY search/ search/
COPY kvpolicy/ kvpolicy/
COPY runtime/ runtime/
COPY models/ models/
COPY hedgerow_sglang/ hedgerow_sglang/
COPY deploy/sglang-plugin/ deploy/sglang-plugin/
RUN /opt/hedgerow/bin/pip install -c constraints.txt ".[traces]" \
    && /opt/hedgerow/bin/pip wheel --no-deps -w wheels ./deploy/sglang-plugin

FROM ${PYTHON_IMAGE} AS cpu
# The embedded engine compiles for the processor that it finds, by the base image's own release.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/hedgerow /opt/hedgerow
ENV PATH=/opt/hedgerow/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp \
    HEDGEROW_HOST=0.0.0.0 HEDGEROW_PORT=8000 HEDGEROW_LOG_FORMAT=json
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['HEDGEROW_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["hedgerow"]
CMD ["serve"]

# SGLang's own image and Python with the plug-in, which needs no package that SGLang has not: a
# server for a policy or a reward model. Hedgerow's own server runs from the other image.
FROM ${SGLANG_IMAGE} AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --from=build /src/wheels/ /src/wheels/
RUN python3 -m pip install --break-system-packages --no-deps /src/wheels/*.whl
ENV PYTHONUNBUFFERED=1 HOME=/tmp HF_HUB_OFFLINE=1 SGLANG_RETURN_ORIGINAL_LOGPROB=1 \
    SGLANG_EXTERNAL_MODEL_PACKAGE=hedgerow_sglang.reward_models
USER 10001:10001
WORKDIR /tmp
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host=0.0.0.0", "--port=30000", "--enable-metrics"]
CMD ["--model-path=/models/policy"]
