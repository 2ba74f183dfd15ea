# docker build --target cpu -t hedgerow:cpu .     the server, the embedded engine, the bundled models
# docker build --target gpu -t hedgerow:gpu .     the same beside SGLang with Hedgerow's plug-in, for GPUs
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
    && /opt/hedgerow/bin/pip wheel --no-deps -w wheels . ./deploy/sglang-plugin

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

# SGLang's own image and Python with the plug-in, which needs no package that SGLang has not; and
# beside it Hedgerow with its packages, which starts SGLang's servers in its own container. A pool of
# servers by themselves (the chart's) starts python3 -m sglang.launch_server in place of it.
FROM ${SGLANG_IMAGE} AS gpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /src/
COPY --from=build /src/wheels/ /src/wheels/
RUN python3 -m pip install --break-system-packages --no-deps /src/wheels/hedgerow_sglang-*.whl \
    && python3 -m venv --without-pip /opt/hedgerow \
    && python3 -m pip --python /opt/hedgerow/bin/python install -c /src/constraints.txt \
        --extra-index-url "$TORCH_INDEX" torch \
    && python3 -m pip --python /opt/hedgerow/bin/python install -c /src/constraints.txt \
        "hedgerow[traces] @ file://$(echo /src/wheels/hedgerow-*.whl)" \
    && mkdir /cache && chown 10001:10001 /cache
ENV PYTHONUNBUFFERED=1 HOME=/cache SGLANG_RETURN_ORIGINAL_LOGPROB=1 \
    SGLANG_EXTERNAL_MODEL_PACKAGE=hedgerow_sglang.reward_models \
    HEDGEROW_HOST=0.0.0.0 HEDGEROW_PORT=8000 HEDGEROW_LOG_FORMAT=json \
    HEDGEROW_LAUNCH_PYTHON=/usr/bin/python3
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
# Until a model has been downloaded and loaded nothing listens.
HEALTHCHECK --interval=10s --timeout=5s --start-period=3600s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['HEDGEROW_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["/opt/hedgerow/bin/hedgerow"]
CMD ["serve"]
