# docker build -t dp-ema . && docker run --rm -v "$PWD:/work" dp-ema train input.json
FROM python:3.11-slim
# without a GPU; leave the argument empty for the build of torch for CUDA
ARG INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir ${INDEX:+--extra-index-url $INDEX} -c constraints.txt '.[ase,plot,lmdb]'
WORKDIR /work
ENTRYPOINT ["dp-ema"]
CMD ["--help"]
