# A server on an NVIDIA GPU; the host has its driver and the NVIDIA Container Toolkit, the image has
# CUDA, as wheels. From the root of a checkout:
#   docker build -f scripts/deploy/cuda.Dockerfile -t jaxserve:cuda .
#   docker run --gpus all -p 8000:8000 -e JAXSERVE_API_KEY=... -v jaxserve:/var/lib/jaxserve \
#     --stop-timeout 60 jaxserve:cuda serve org/name
FROM python:3.11-slim-bookworm AS build

# cuda13 needs a driver from 580 on, cuda12 one from 525 on.
ARG CUDA=cuda13
WORKDIR /src
RUN python -m venv /opt/jaxserve
ENV PATH=/opt/jaxserve/bin:$PATH
# Requirements alone, in the versions that tests run with: this layer stays while only code changes.
COPY pyproject.toml scripts/constraints.txt ./
RUN mkdir jaxserve pallas_kernels && touch README.md LICENSE \
    && pip install --no-cache-dir -c constraints.txt ".[events,otel,${CUDA}]"
COPY . .
RUN pip install --no-cache-dir --no-deps --force-reinstall .

FROM python:3.11-slim-bookworm

# Models and programs; a volume keeps them for the next start. The folder's user owns what is in it.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/jaxserve jaxserve \
    && install -d -m 0700 -o jaxserve -g jaxserve /var/lib/jaxserve
COPY --from=build /opt/jaxserve /opt/jaxserve
# No key is in the image: without JAXSERVE_API_KEY, or --insecure, the server refuses to start.
ENV PATH=/opt/jaxserve/bin:$PATH \
    HOME=/var/lib/jaxserve \
    HF_HOME=/var/lib/jaxserve/hub \
    PYTHONUNBUFFERED=1 \
    JAXSERVE_HOST=0.0.0.0 \
    JAXSERVE_COMPILATION_CACHE_DIR=/var/lib/jaxserve/programs \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/jaxserve
VOLUME ["/var/lib/jaxserve"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The server is process 1 and gets SIGTERM itself: it drains, then ends.
ENTRYPOINT ["jaxserve"]
CMD ["serve"]
