"""The control plane: a live cluster on `decide`.

cycle.py            the numbered scheduling cycle
live_state.py       the scheduler's state, folded from the record; grants.py gives starts their GPU ids
plane.py            what users ask, nodes report and cycles decide, each in one transaction
store.py tables.py  the database and the record; faults.py kills at a chosen write
node.py             a node obeys its orders (messages.py); host_starts.py are its processes, node_process.py its agent
roles.py            who may call what; accounts.py tokens.py users and tokens; access_guard.py and audit.py
rate_limit.py       limits requests; slow_clients.py ends connections that dawdle
secret_store.py     encrypted secrets, secret_keys.py their key; tenant_changes.py changes the tree of tenants
app.py              the HTTP API behind access_guard.py; views.py what it answers
live_service.py     threads and agents of a running service; decider.py decides in a process of its own
certificates.py     the service's authority and its server; peer_certificate.py tells who a client is; renewals.py
job_streams.py      ports and logs of jobs, carried by stream_carrier.py; node_streams.py and node_logs.py at the node
new_jobs.py         submissions; offers.py tells the scheduler of those that nothing stands in the way of
folds.py            bounded starts, over record_lines.py; event_sentences.py is the record for people
run_progress.py     what runs have saved; trials.py tries a job or a policy
usage.py metrics.py webhooks.py  what operators watch, by operation_routes.py
service_engine.py   the service as an engine, over connection.py
"""
