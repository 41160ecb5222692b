"""NATS accounts, one per job: keys, signed claims, the server's trust, and the requests to it.

```
operator seed (Secret <release>-nats-auth, created once)
  |-- signs --> operator JWT, system account JWT     auth.conf, which nats-server includes
  |-- derives --> account key of every job           never leaves the operator
  |                 |-- signs --> user JWT + seed    nats.creds in the job's Secret
  `-- signs --> account JWT of every job             pushed to the server, which stores it on disk
```
All keys are derived from one seed, so that a restarted operator signs the same claims and need not
remember anything.
"""
