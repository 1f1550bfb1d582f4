# Every target sets up what it needs; `make run` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2/model.safetensors
STORE := redis://127.0.0.1:9221
# One make at a time changes the environment. One that waited looks whether the target has been made by then.
SETUP = @PYTHON="$(PYTHON)" conf/exclusive.sh "$(filter $(VENV)/% $(MODEL),$@)" "$^"
CORE := setup.py kvpage_server/core/sources.py $(wildcard kvpage_server/core/native/*.p[xy][xd] kvpage_server/core/native/*.h)

.DEFAULT_GOAL := setup
.PHONY: setup run chat serve demo site test-site test test-connectors test-frameworks test-packages test-matrix test-elsewhere check soak fuzz sanitize lint format docs bench core demo-cluster cluster cluster-stop lock release wheels clean help

setup: $(VENV)/dev.stamp $(MODEL)  ## everything: server, engine, development tools, the small model

run: $(VENV)/server.stamp  ## the server with its embedded store, in data/, on port 9221
	mkdir -p -m 700 data
	"$(BIN)/kvpage-server" conf/kvpage.conf --dir data

chat: $(VENV)/engine.stamp $(MODEL)  ## a conversation with the small model; a later one goes on with it
	mkdir -p -m 700 data
	"$(BIN)/kvpage-engine" chat --store $(STORE) --transcript data/chat.json

serve: $(VENV)/engine.stamp $(MODEL)  ## the small model on port 8000, for OpenAI's clients
	"$(BIN)/kvpage-engine" serve --store $(STORE)

demo: $(VENV)/engine.stamp $(MODEL)  ## a conversation that moves between two engines
	"$(BIN)/kvpage-engine" demo

# More than there are cores: tests wait for more than half of their time.
WORKERS ?= 5
ALONE = $(shell grep -rl 'pytest.mark.alone' tests --include='test_*.py')
ON_BOTH_CORES := tests/server/commands/test_keyspace.py tests/server/commands/pages/test_blocks.py \
	tests/server/store/test_extent.py tests/server/commands/test_strings.py tests/server/net/test_sessions.py \
	tests/server/commands/test_transactions.py tests/server/resp/test_reply.py tests/server/net/test_receiving.py \
	tests/server/commands/test_mutations.py tests/server/compatibility/test_differential.py \
	tests/server/commands/pages/test_index_keys.py tests/server/client/test_async_page_client.py \
	tests/server/client/test_page_client.py tests/server/client/test_raw_commands.py \
	tests/server/commands/pages/test_page_commands.py \
	tests/server/commands/pages/test_page_properties.py tests/server/commands/pages/test_page_protection.py \
	tests/server/commands/pages/test_page_queries.py
# A failed test runs a second time, with few others beside it: one that also fails then is broken, the other depends on
# the time that a busy machine takes. pytest prints both results.
AGAIN := --last-failed --last-failed-no-failures none --maxfail 3
tests = $(2) "$(BIN)/python" -m pytest $(1) || { [ $$? = 1 ] && $(2) "$(BIN)/python" -m pytest $(AGAIN); }
test: $(VENV)/dev.stamp $(MODEL)  ## every test, with real servers, clients and the real small model; KVPAGE_CORE=python: all on that core
	$(call tests,-n $(WORKERS) --no-loadscope-reorder -m "not soak and not alone")
	$(call tests,-m "alone and not soak" $(ALONE))
	$(call tests,-n $(WORKERS) -m "not soak and not alone" $(ON_BOTH_CORES),KVPAGE_CORE=python)
	"$(BIN)/python" tests/elsewhere.py --short

test-connectors: $(VENV)/dev.stamp $(MODEL)  ## the connectors with the real vLLM, LMCache and SGLang on the CPU; QUICK=1: two contexts in vLLM, no failures
	PYTHON="$(BIN)/python" QUICK="$(QUICK)" tests/connectors/run.sh

test-frameworks: $(VENV)/dev.stamp $(MODEL)  ## agent frameworks with the real small model, in an environment of their own
	PYTHON="$(BIN)/python" tests/frameworks/run.sh

test-packages: $(VENV)/dev.stamp $(MODEL)  ## the package in clean environments of every Python that is found, from the registry
	"$(BIN)/python" -m pytest -m "soak or not soak" tests/packages

test-matrix: $(VENV)/dev.stamp $(MODEL)  ## quick tests with the oldest and the newest version of every dependency, each in an environment of its own
	$(SETUP) '"$(BIN)/python" -m pip install --quiet uv'
	UV="$(abspath $(BIN)/uv)" PYTHON="$(abspath $(BIN)/python)" tests/matrix.sh

test-elsewhere: $(VENV)/dev.stamp $(MODEL)  ## sensitive tests as on other machines: kernels of OpenBLAS, umask, user, encoding; an hour
	"$(BIN)/python" tests/elsewhere.py

check: $(VENV)/dev.stamp lint  ## the inner loop: lint, types and the server's tests that are quick
	"$(BIN)/python" -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not slow and not alone and not soak" tests/server

FUZZ_SECONDS ?= 60
soak: $(VENV)/dev.stamp  ## what takes long: storms, crashes, every family, inputs that nobody has tried
	"$(BIN)/python" -m pytest -m soak -s
	"$(BIN)/python" -m pytest -m "hypothesis and not soak and not alone" --hypothesis-profile anything

fuzz: $(VENV)/dev.stamp  ## noise for both cores, for FUZZ_SECONDS: guided by coverage, then watched for misuse of memory
	$(SETUP) '"$(BIN)/python" -m pip install --quiet --editable ".[fuzz]"'
	"$(BIN)/python" tests/fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=20000 build/fuzz/parser
	tests/sanitized.sh tests/fuzz/seeded.py $(FUZZ_SECONDS)

sanitize: $(VENV)/dev.stamp  ## the core's tests, in a build that sees misuse of memory
	tests/sanitized.sh -m pytest -s -m "not soak and not alone" -k "not scanned_once" tests/server/core/test_core_alike.py tests/server/core/test_core_memory.py tests/server/resp/test_parser.py tests/server/core/test_outbox.py tests/server/test_lossless.py \
		tests/server/commands/pages/test_page_properties.py tests/server/commands/pages/test_mapped.py tests/server/client/test_page_client_mapped.py

lint: $(VENV)/dev.stamp  ## ruff, vulture, mypy, undeclared names in JavaScript, and unclear phrases in comments
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" check --preview --select PLW1514 --quiet .
	"$(BIN)/ruff" format --check .
	"$(BIN)/vulture"
	[ ! -x "$(BIN)/biome" ] || "$(BIN)/biome" lint --only=correctness/noUndeclaredVariables kvpage_server engine
	"$(BIN)/mypy"
	"$(BIN)/python" tests/plain_words.py

format: $(VENV)/dev.stamp  ## the code as ruff wants it
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

docs: $(VENV)/dev.stamp  ## the references of commands and parameters, and the manual pages, from their declarations
	"$(BIN)/python" -m conf.commands > docs/commands.md
	"$(BIN)/python" -m conf.parameters > docs/configuration.md
	"$(BIN)/python" -m conf.manual conf/man

site: $(VENV)/docs.stamp  ## the documentation as a site, in build/site; warnings are errors
	"$(BIN)/python" -m sphinx --fail-on-warning --keep-going --quiet docs build/site
	@echo "build/site/index.html"

test-site: $(VENV)/docs.stamp $(VENV)/dev.stamp  ## the site in a browser: both themes, a phone, search without a network
	"$(BIN)/python" -m pytest tests/docs/test_site.py tests/docs/test_built_site.py

bench: $(VENV)/dev.stamp $(MODEL)  ## prints the tables of docs/performance.md
	"$(BIN)/python" -m benchmarks

demo-cluster: $(VENV)/dev.stamp $(MODEL)  ## a conversation on a Valkey Cluster whose masters die
	"$(BIN)/python" -m benchmarks.demo_cluster

cluster: $(VENV)/dev.stamp  ## a Valkey Cluster on ports 7000 to 7005: three masters, three replicas
	"$(BIN)/python" -m benchmarks.valkey_cluster start

cluster-stop: $(VENV)/dev.stamp  ## ends it
	"$(BIN)/python" -m benchmarks.valkey_cluster stop

core: $(VENV)/server.stamp  ## compiles the page core again, and shows what the compiler says
	$(SETUP) '"$(BIN)/python" -m pip install --verbose --no-build-isolation --no-deps --editable .'
	"$(BIN)/kvpage-server" --version

lock: $(VENV)/bin/python  ## renews conf/locks: the newest dependencies, with hashes
	$(SETUP) '"$(BIN)/python" -m pip install --quiet uv'
	conf/lock.sh "$(BIN)/uv"

release: $(VENV)/dev.stamp  ## wheels, sdist, checksums and SBOM of VERSION in dist/, a commit and a tag; DRY_RUN=1: only the files
	$(SETUP) '"$(BIN)/python" -m pip install --quiet --require-hashes --requirement conf/locks/wheels.txt'
	"$(BIN)/python" conf/release.py "$(VERSION)" $(if $(DRY_RUN),--dry-run)

wheels: $(VENV)/dev.stamp  ## wheels in dist/, by cibuildwheel where docker runs, else for every Python that is found
	conf/wheels.sh "$(BIN)/python" dist

clean:  ## removes the environment and what tools keep; not the model, the compiled core or data
	rm -rf "$(VENV)" build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /make \1	/p' $(MAKEFILE_LIST) | expand -t 15

$(VENV)/bin/python:
	$(SETUP) 'conf/venv.sh "$(VENV)"'

$(VENV)/server.stamp: pyproject.toml conf/locks/build.txt conf/locks/web.txt $(CORE) $(VENV)/bin/python
	$(SETUP) 'conf/install.sh "$(VENV)" web; touch $@'

$(VENV)/engine.stamp: pyproject.toml conf/locks/build.txt conf/locks/engine.txt $(CORE) $(VENV)/bin/python
	$(SETUP) 'conf/install.sh "$(VENV)" engine; touch $@ $(VENV)/server.stamp'

$(VENV)/dev.stamp: pyproject.toml conf/locks/build.txt conf/locks/dev.txt $(CORE) $(VENV)/bin/python
	$(SETUP) 'tests/install-tools.sh; conf/install.sh "$(VENV)" dev; touch $@ $(VENV)/engine.stamp $(VENV)/server.stamp'

$(VENV)/docs.stamp: conf/locks/docs.txt $(VENV)/bin/python
	$(SETUP) '"$(BIN)/python" -m pip install --quiet --require-hashes --requirement conf/locks/docs.txt; touch $@'

$(MODEL): | $(VENV)/engine.stamp
	$(SETUP) '"$(BIN)/kvpage-engine" fetch-model smollm2 --to models/smollm2'
