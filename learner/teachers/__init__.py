"""Teachers: models that the policy is trained towards, by their logprobs of the tokens that the policy sampled, or of
the likeliest ones in their places.

    group accepted ── Teachers.prefetch ──▶ a task ──▶ RemoteTeacher ──▶ POST /v1/logprobs of a generator
    batch taken ───── Teachers.scores ────▶ its result: there already, if the teacher keeps up
    group dropped ─── Teachers.forget

A teacher in a folder is asked nothing here: the ranks load it as they load a reference (`TeacherConfig.path`), and its
logprobs are computed with the batch, at the policy's own temperature. `config.teacher_of` says whose a group is.

One run may have teachers of both kinds, and all of them have the learner's tokenizer.

`config` is what a user sets, `limits` the groups that teachers can be asked of, `teachers` one teacher and all of them.
"""
