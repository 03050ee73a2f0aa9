# kg and kgctl, for amd64 and arm64:
#   docker buildx build --platform linux/amd64,linux/arm64 -t kilo-ebpf/kilo:0.1.0 .
# Compilers run on the machine's own architecture; only the last stage installs
# packages under emulation.
# Paths are those of Kilo's image, so that DaemonSets written for it work:
# /opt/bin/kg is the entry point, /opt/cni/bin holds the CNI plugins.

FROM --platform=$BUILDPLATFORM rust:1.95-bookworm AS kilo
WORKDIR /src
COPY . .
# The BPF object is the same for both architectures.
RUN cargo xtask build-ebpf
ARG TARGETARCH
ENV CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=x86_64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# The distribution's updates are wanted: no version is pinned here and below.
# hadolint ignore=DL3008
RUN case "$TARGETARCH" in \
      amd64) cpu=x86_64 gcc=gcc-x86-64-linux-gnu ;; \
      arm64) cpu=aarch64 gcc=gcc-aarch64-linux-gnu ;; \
      *) echo "no build for $TARGETARCH" >&2; exit 1 ;; \
    esac \
 && if [ "$TARGETARCH" != "$(dpkg --print-architecture)" ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends "$gcc" "libc6-dev-$TARGETARCH-cross" \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
 && rustup target add "$cpu-unknown-linux-gnu" \
 && CARGO_PROFILE_RELEASE_STRIP=debuginfo \
    cargo build --locked --release --package kilo-agent --bins --target "$cpu-unknown-linux-gnu" \
 && mkdir /out \
 && cp "target/$cpu-unknown-linux-gnu/release/kg" "target/$cpu-unknown-linux-gnu/release/kgctl" /out/

# Debian's binaries of the plugins want the host's C library to be as new as
# Debian's; these are static, since they run on the host.
FROM --platform=$BUILDPLATFORM debian:bookworm-slim AS cni
# hadolint ignore=DL3008
RUN sed -i 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources \
 && apt-get update \
 && apt-get install --yes --no-install-recommends dpkg-dev golang-go \
    golang-github-containernetworking-plugins-dev \
    golang-github-mattn-go-shellwords-dev \
    golang-github-networkplumbing-go-nft-dev
WORKDIR /build
ARG TARGETARCH
RUN apt-get source --only-source golang-github-containernetworking-plugins \
 && plugins=/usr/share/gocode/src/github.com/containernetworking/plugins \
 && rm -r "$plugins" \
 && mv golang-github-containernetworking-plugins-*/ "$plugins" \
 && for plugin in main/bridge main/loopback ipam/host-local meta/portmap; do \
      GO111MODULE=off GOPATH=/usr/share/gocode CGO_ENABLED=0 GOARCH="$TARGETARCH" \
      go build -trimpath -ldflags '-s -w' -o "/out/${plugin#*/}" \
        "github.com/containernetworking/plugins/plugins/$plugin" || exit 1; \
    done

# A shell and cp are what init containers of Kilo's DaemonSets need. The agent
# wants capabilities, which Kubernetes gives to root only; the webhook runs as any user.
FROM debian:bookworm-slim
# Certificates for kubeconfigs that trust public authorities; iptables for
# --iptables-forward-rules.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates iptables \
 && rm -rf /var/lib/apt/lists/*
# For --iptables-forward-rules, and for masquerading IPv6.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends iptables nftables \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cni /out/ /opt/cni/bin/
COPY --from=kilo /out/ /opt/bin/
ENV PATH=/opt/bin:$PATH
ENTRYPOINT ["/opt/bin/kg"]
